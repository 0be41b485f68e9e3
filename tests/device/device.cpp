// A CUDA device in software, for a torch that was built without CUDA.
//
// Tensors on "cuda:0" are plain tensors whose memory is the host's and whose kernels are the CPU's.
// All that is between Python and a kernel is torch's own and goes the ways of CUDA: dispatcher,
// autocast, autograd's device thread, generators, streams and events. The device knows
//
//     what is launched     each operation that is no view; a foreach or fused one is one launch
//     what waits           a number read on the host, a copy that is not non_blocking, synchronize
//     what races           two streams at one memory with no event between them
//     what moves           copies between host and device
//
// New memory is full of 0xA5, and what is copied to pinned memory without waiting comes there only
// once somebody has waited. It sees no CUDA kernel: neither rounding nor speed.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/ForeachUtils.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>

namespace {

using at::Tensor;
using c10::Stream;
using c10::StreamId;
using std::string;

const c10::Device GPU(c10::kCUDA, 0);
const c10::DispatchKeySet ON_CPU(c10::DispatchKey::CPU), ON_GPU(c10::DispatchKey::CUDA);
std::recursive_mutex& guarded = *new std::recursive_mutex;  // autograd has a thread of its own
using Lock = std::lock_guard<std::recursive_mutex>;
thread_local StreamId current = 0;

// What was done ---------------------------------------------------------------------------------

auto& seen = *new std::vector<string>;
auto& races = *new std::vector<string>;
bool recording = false, strict = false;

void note(const string& what) {
  Lock _(guarded);
  if (recording) seen.push_back(what + (current ? " @" + std::to_string(current) : ""));
}

void wait_for_device(const string& what) {
  note("wait " + what);
  TORCH_CHECK(!strict, "called a synchronizing CUDA operation: ", what);
}

// In which order: vector clocks -----------------------------------------------------------------
//
// Streams run side by side. One knows of another what it has heard by an event, or by the host,
// which has waited for it; at memory that two of them use the later one has to know of the earlier.

using Clock = std::map<StreamId, unsigned long long>;
constexpr StreamId HOST = -1;
auto& known = *new std::map<StreamId, Clock>;  // by whom

struct Block {  // of memory, by its address
  StreamId home = 0;  // the allocator gives it to this stream again, without waiting
  Clock written, read;
  std::set<StreamId> recorded;  // by record_stream: the allocator waits for these
};
auto& blocks = *new std::map<const void*, Block>;

struct Landing {  // a copy to pinned memory which nobody has waited for
  Tensor place, bytes;
  StreamId stream;
  unsigned long long time;
};
auto& landings = *new std::vector<Landing>;

void learn(Clock& who, const Clock& what) {
  for (auto [stream, time] : what) who[stream] = std::max(who[stream], time);
}

void race(const string& does, StreamId stream, const string& did) {
  races.push_back("stream " + std::to_string(current) + does + std::to_string(stream) + did);
}

void use(const Tensor& t, bool writes) {
  if (!t.defined() || !t.has_storage() || !t.storage().nbytes()) return;
  auto found = blocks.find(t.storage().data());
  if (found == blocks.end()) return;  // pageable memory: the driver waits by itself
  auto& [home, written, read, recorded] = found->second;
  auto& mine = known[current];
  for (auto [stream, time] : written)
    if (mine[stream] < time) race(" uses what stream ", stream, " wrote, without waiting for it");
  if (writes)
    for (auto [stream, time] : read)
      if (mine[stream] < time)
        race(" writes over what stream ", stream, " reads, without waiting for it");
  (writes ? written : read)[current] = mine[current];
}

void launch(const string& what) {
  Lock _(guarded);
  auto& mine = known[current];
  learn(mine, known[HOST]);
  mine[current]++;
  note(what);
}

void land(bool all) {  // what the host, or with `all` whoever reads it next, may see
  std::vector<Landing> later;  // freed without the lock, since Python may have a part in it
  Lock _(guarded);
  auto& host = known[HOST];
  c10::impl::ForceDispatchKeyGuard of_no_transform(
      {}, c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  for (auto& each : landings)
    if (all || host[each.stream] >= each.time) each.place.copy_(each.bytes);
    else later.push_back(each);
  landings.swap(later);
}

void host_learns(const Clock& what) {
  {
    Lock _(guarded);
    learn(known[HOST], what);
  }
  land(false);
}

// Memory ----------------------------------------------------------------------------------------

long long alive = 0, peak = 0, limit = -1;

struct Held {  // what a block of the device is made of: memory of its own, or a CPU tensor's
  void* address;
  long long bytes;
  c10::Storage of;
};

c10::DataPtr take(void* address, size_t n, c10::Storage of) {
  Lock _(guarded);
  long long bytes = (n + 511) / 512 * 512;  // as CUDA's allocator rounds
  TORCH_CHECK_WITH(
      OutOfMemoryError, limit < 0 || alive + bytes <= limit,
      "CUDA out of memory. Tried to allocate ", n, " bytes.");
  alive += bytes;
  peak = std::max(peak, alive);
  blocks[address] = Block{current, {}, {}, {}};
  auto drop = [](void* context) {
    std::unique_ptr<Held> held(static_cast<Held*>(context));  // freed without the lock
    Lock _(guarded);
    auto found = blocks.find(held->address);
    if (found != blocks.end()) {
      auto& [home, written, read, recorded] = found->second;
      auto next = known[home];  // all that whoever is given the memory next will know
      learn(next, known[HOST]);
      for (auto& used : {written, read})
        for (auto [stream, time] : used)
          if (stream != home && !recorded.count(stream) && next[stream] < time)
            races.push_back(
                "memory of stream " + std::to_string(home) + " is freed while stream " +
                std::to_string(stream) + " uses it: record_stream is missing");
      blocks.erase(found);
    }
    alive -= held->bytes;
    if (!held->of) std::free(held->address);
  };
  return {address, new Held{address, bytes, std::move(of)}, drop, GPU};
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (!n) return {nullptr, nullptr, [](void*) {}, GPU};
    Lock _(guarded);
    auto* address = std::malloc(n);
    try {
      auto data = take(address, n, {});
      std::memset(address, 0xA5, n);  // nobody may count on zeros
      return data;
    } catch (...) {
      std::free(address);
      throw;
    }
  }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} & device_memory = *new DeviceMemory;

auto& pinned = *new std::set<const void*>;

struct PinnedMemory final : c10::Allocator {
  static void drop(void* address) {
    Lock _(guarded);
    pinned.erase(address);
    blocks.erase(address);
    std::free(address);
  }
  c10::DataPtr allocate(size_t n) override {
    Lock _(guarded);
    auto* address = std::malloc(n ? n : 1);
    pinned.insert(address);
    blocks[address] = Block{};
    return {address, address, &drop, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} & pinned_memory = *new PinnedMemory;

// Streams and events ----------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Stream stream(StreamId id) { return Stream(Stream::UNSAFE, GPU, id); }
  static Stream new_stream() {
    static std::atomic<StreamId> last{0};
    return stream(++last);
  }
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return GPU; }
  c10::Device getDevice() const override { return GPU; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(c10::Device) const noexcept override { return stream(current); }
  Stream getDefaultStream(c10::Device) const override { return stream(0); }
  Stream getStreamFromGlobalPool(c10::Device, bool) const override { return new_stream(); }
  Stream getNewStream(c10::Device, int) const override { return new_stream(); }
  Stream exchangeStream(Stream s) const noexcept override {
    return stream(std::exchange(current, s.id()));
  }
  void record(void** event, const Stream& s, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    Lock _(guarded);
    if (!*event) *event = new Clock;
    learn(known[s.id()], known[HOST]);
    *static_cast<Clock*>(*event) = known[s.id()];
  }
  void block(void* event, const Stream& s) const override {
    Lock _(guarded);
    if (event) learn(known[s.id()], *static_cast<Clock*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock*>(event);
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }
  void synchronizeEvent(void* event) const override {
    wait_for_device("synchronize an event");
    if (event) host_learns(*static_cast<Clock*>(event));
  }
  void synchronizeStream(const Stream& s) const override {
    wait_for_device("synchronize a stream");
    host_learns(known[s.id()]);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    wait_for_device("synchronize the device");
    Clock all;
    {
      Lock _(guarded);
      for (auto& [stream, clock] : known) learn(all, clock);
    }
    host_learns(all);
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// Random numbers: a generator of the device is a CPU's under another name -------------------------

struct Generator : c10::GeneratorImpl {
  at::Generator cpu = at::detail::createCPUGenerator(67280421310721);
  Generator() : c10::GeneratorImpl(GPU, ON_GPU) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override {
    using Owned = c10::intrusive_ptr<c10::TensorImpl, at::UndefinedTensorImpl>;
    auto* impl = const_cast<c10::TensorImpl*>(&state);
    cpu.set_state(Tensor(Owned::unsafe_reclaim_from_nonowning(impl)));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.get_state().getIntrusivePtr();
  }
  c10::GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator;
    copy->cpu = cpu.clone();
    return copy;
  }
};

const at::Generator& default_generator() {
  static auto& it = *new at::Generator(at::make_generator<Generator>());
  return it;
}
at::Generator cpu_of(const at::Generator& g) {
  return g.device().is_cuda() ? static_cast<Generator*>(g.unsafeGetGeneratorImpl())->cpu : g;
}
bool hand_out_default = false;  // how Python comes to hold the default generator itself

// Kernels: the CPU's, on the same memory ----------------------------------------------------------

Tensor on_cpu(const Tensor& t) {
  if (!t.defined() || !t.is_cuda() || t.layout() != at::kStrided) return t;
  auto options = t.options().device(at::kCPU).pinned_memory(false);
  auto size = int64_t(t.storage().nbytes());
  if (!size) return at::empty_strided(t.sizes(), t.strides(), options);
  auto keep = [t](void*) {};
  auto flat = at::from_blob(t.storage().mutable_data(), {size}, keep, at::kByte);
  c10::Storage storage = flat.storage();
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), ON_CPU, t.dtype());
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return out;
}

c10::Storage storage_of(const Tensor& cpu) {
  auto n = cpu.storage().nbytes();
  auto data = n ? take(cpu.storage().mutable_data(), n, cpu.storage()) : device_memory.allocate(0);
  return c10::Storage(c10::Storage::use_byte_size_t(), n, std::move(data), &device_memory, true);
}

Tensor on_device(const Tensor& cpu, c10::Storage storage) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), ON_GPU, cpu.dtype());
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  return out;
}

const std::set<string> READ_BY_HOST = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal",
    "aten::is_nonzero", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::bincount", "aten::_coalesce", "aten::multinomial"};
const std::set<string> INDEXED = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};

bool is_mask(const Tensor& t) {
  return t.defined() && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte);
}

// What host and device would have to agree on before such a call can go on, or "".
string reason_to_wait(const c10::OperatorHandle& op, const std::vector<c10::IValue>& given) {
  const auto& name = op.schema().name();
  if (READ_BY_HOST.count(name)) return name;
  if (name == "aten::repeat_interleave" && op.schema().overload_name() == "Tensor") return name;
  if (INDEXED.count(name))
    for (const auto& t : given[1].toOptionalTensorVector()) {
      if (t && is_mask(*t)) return name + " by a mask";
      if (t && t->defined() && !t->is_cuda() && t->dim()) return name + " by indices of the host";
    }
  return "";
}

// A foreach operation is one kernel for tensors that are alike, and else one for each of them.
size_t kernels_of(const string& name, const std::vector<c10::IValue>& given) {
  if (name.rfind("aten::_foreach_", 0) != 0) return 1;
  std::vector<std::vector<Tensor>> lists;
  for (const auto& v : given)
    if (v.isTensorList()) lists.push_back(v.toTensorVector());
  std::vector<at::TensorList> views(lists.begin(), lists.end());
  auto are_alike = [](at::ArrayRef<at::TensorList> lists) {
    return at::native::can_use_fast_route(lists, {}, false);
  };
  bool alike = name != "aten::_foreach_copy_"  // which also casts
      ? are_alike(views)
      : are_alike(views[0]) && are_alike(views[1]) &&
          at::native::_check_tensors_share_sizes_and_strides(views);
  for (const auto& v : given)
    if (v.isTensor() && v.toTensor().is_cuda())
      alike &= v.toTensor().dtype() == views[0][0].dtype();
  return alike ? 1 : views[0].size();
}

// Where torch has a kernel of CUDA's in mind it makes the result itself and hands it in as out=, in
// a shape that the CPU's kernel may change: nobody is told of that.
struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

struct Pair {  // one memory as a tensor of the device, and as one of the CPU
  Tensor device, cpu;
};

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const auto n = schema.arguments().size();
  std::vector<c10::IValue> given(stack->end() - n, stack->end()), turned;
  std::vector<Pair> pairs, written;
  bool mixed = false, generator_given = false, writes = false;
  auto turn = [&](const Tensor& t, bool any_dim = false) -> Tensor {
    if (!t.defined()) return t;
    if (!t.is_cuda()) {  // a number on the host is a kernel's argument
      mixed |= t.device().is_cpu() && (any_dim || t.dim());
      return t;
    }
    pairs.push_back({t, on_cpu(t)});
    if (writes) written.push_back(pairs.back());
    return pairs.back().cpu;
  };
  for (size_t i = 0; i < n; i++) {
    const auto& v = given[i];
    const auto& argument = schema.arguments()[i];
    writes = argument.alias_info() && argument.alias_info()->isWrite();
    if (v.isTensor()) {
      turned.emplace_back(turn(v.toTensor()));
    } else if (v.isTensorList()) {
      std::vector<Tensor> list;
      bool joins = name == "aten::cat" || name == "aten::stack";
      for (const auto& t : v.toTensorVector()) list.push_back(turn(t, joins));
      turned.emplace_back(list);
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& t : v.toOptionalTensorVector())
        list.push_back(t ? std::optional(turn(*t)) : std::nullopt);
      turned.emplace_back(list);
    } else if (v.isDevice()) {
      turned.emplace_back(c10::Device(at::kCPU));
    } else if (v.isGenerator() || (v.isNone() && argument.name() == "generator")) {
      generator_given = true;
      turned.emplace_back(cpu_of(v.isNone() ? default_generator() : v.toGenerator()));
    } else {
      turned.push_back(v);
    }
  }
  TORCH_CHECK(
      !mixed || INDEXED.count(name),
      "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
      "cpu! (", name, ")");
  auto why = reason_to_wait(op, given);
  if (!why.empty()) wait_for_device(why);
  const auto& overload = schema.overload_name();
  for (size_t i = kernels_of(name, given); i > 0; i--)
    launch("launch " + name + (overload.empty() ? "" : "." + overload));
  if (!why.empty()) host_learns(known[current]);
  for (const auto& pair : pairs) use(pair.device, false);
  for (const auto& pair : written) use(pair.device, true);
  torch::jit::drop(*stack, n);
  stack->insert(stack->end(), turned.begin(), turned.end());
  // What draws and takes no generator draws from the CPU's: it is lent the state of the device's.
  bool lent = op.hasTag(at::Tag::nondeterministic_seeded) && !generator_given;
  at::Generator host = at::detail::getDefaultCPUGenerator(), mine = cpu_of(default_generator());
  Tensor before;
  if (lent) {
    before = host.get_state();
    host.set_state(mine.get_state());
  }
  {
    Silent silent;
    std::optional<c10::WarningUtils::WarningHandlerGuard> guard;
    if (overload == "out") guard.emplace(&silent);
    op.redispatchBoxed(ON_CPU, stack);
  }
  if (lent) {
    mine.set_state(host.get_state());
    host.set_state(before);
  }
  for (auto& [device, cpu] : pairs) {
    if (device.layout() != at::kStrided) continue;
    bool filled = !device.storage().nbytes() && cpu.storage().nbytes();
    if (!filled && device.sizes() == cpu.sizes()) continue;
    auto* impl = device.unsafeGetTensorImpl();  // out= was resized
    impl->set_storage_keep_dtype(storage_of(cpu));
    impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  }
  auto back = [&](const Tensor& result) -> Tensor {
    if (!result.defined() || result.layout() != at::kStrided) return result;
    for (auto& [device, cpu] : pairs)
      if (result.is_same(cpu)) return device;
    for (auto& [device, cpu] : pairs)
      if (result.storage().nbytes() && result.storage().data() == cpu.storage().data())
        return on_device(result, device.storage());
    auto out = on_device(result, storage_of(result));
    use(out, true);
    return out;
  };
  const auto m = schema.returns().size();
  for (size_t i = 0; i < m; i++) {
    auto& v = *(stack->end() - m + i);
    if (v.isTensor()) {
      v = back(v.toTensor());
    } else if (v.isTensorList()) {
      std::vector<Tensor> list;
      for (const auto& t : v.toTensorVector()) list.push_back(back(t));
      v = list;
    }
  }
}

using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<at::Device>;
using Pin = std::optional<bool>;
using Format = std::optional<at::MemoryFormat>;

Tensor empty(c10::IntArrayRef size, Dtype dtype, Layout, Device, Pin, Format format) {
  auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_generic(size, &device_memory, ON_GPU, type, format);
}
Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, Dtype dtype, Layout, Device, Pin) {
  auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_strided_generic(size, stride, &device_memory, ON_GPU, type);
}
Tensor zero_without_memory(c10::SymIntArrayRef size, Dtype dtype, Layout, Device, Pin) {
  at::native::ZeroTensorAllocator none(GPU);
  auto keys = ON_GPU | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor);
  auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &none, keys, type, std::nullopt);
}

// CUDA's copy kernel waits exactly where one end is the host and the call is not non_blocking.
Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.is_same(from) || !to.numel()) return to;
  const bool up = !from.is_cuda(), down = !to.is_cuda();
  const bool waits = (up || down) && !non_blocking;
  string what = "launch aten::copy_";
  if (up || down) {
    auto kind = (up ? from : to).is_pinned() ? " pinned" : " pageable";
    what = (up ? "h2d of " : "d2h of ") + std::to_string(to.numel()) + kind;
  }
  if (waits) wait_for_device(what);
  launch(what);
  use(from, false);
  use(to, true);
  at::AutoDispatchBelowADInplaceOrView below;
  auto source = on_cpu(from);
  if (up) land(true);  // a copy may read what another one wrote
  if (down && non_blocking && to.is_pinned()) {
    Lock _(guarded);
    auto bytes = at::empty_like(source).copy_(source);
    landings.push_back({to, bytes, current, known[current][current]});
    auto poison = at::empty_like(source);
    std::memset(poison.storage().mutable_data(), 0xA5, poison.storage().nbytes());
    to.copy_(poison);
  } else {
    on_cpu(to).copy_(source);
  }
  if (waits) host_learns(known[current]);
  return to;
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, Format format) {
  auto* impl = self.unsafeGetTensorImpl();
  auto type = self.scalar_type();
  auto fresh = at::detail::empty_generic(size, &device_memory, ON_GPU, type, format);
  if (fresh.storage().nbytes() > self.storage().nbytes())
    impl->set_storage_keep_dtype(fresh.storage());
  impl->set_sizes_and_strides(fresh.sizes(), fresh.strides(), 0);
  return self;
}

Tensor& set_(
    Tensor& self, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  impl->set_storage_keep_dtype(storage);
  impl->set_sizes_and_strides(sizes, strides, offset.expect_int());
  return self;
}

void record_stream(Tensor& self, Stream s) {
  Lock _(guarded);
  auto found = blocks.find(self.storage().data());
  if (found != blocks.end()) found->second.recorded.insert(s.id());
}

Tensor as_strided(
    const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
    std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_efficientzerotensor", TORCH_FN(zero_without_memory));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  // One launch each: else torch takes them apart into one for every tensor.
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto& overload = op.overload_name;
    const bool out = overload.size() >= 3 && overload.substr(overload.size() - 3) == "out";
    if (op.name.rfind("aten::_foreach_", 0) == 0 && !out) {
      auto full = op.name.substr(6) + (overload.empty() ? "" : "." + overload);
      m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
    }
  }
}

}  // namespace

// What torch asks of CUDA, once, when it is first asked whether there is any.
struct CUDAHooks : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* p) const override {
    Lock _(guarded);
    return pinned.count(p) > 0;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return hand_out_default ? default_generator() : at::make_generator<Generator>();
  }
  c10::Device getDeviceFromPtr(void*) const override { return GPU; }
};
namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

// What Python asks of the device ----------------------------------------------------------------

namespace {
const char* joined(std::vector<string>& lines) {
  static auto& text = *new string;
  Lock _(guarded);
  text.clear();
  for (const auto& line : lines) text += line + "\n";
  lines.clear();
  return text.c_str();
}
}  // namespace

extern "C" {
void device_record(bool on) { recording = on; }
void device_strict(bool on) { strict = on; }
const char* device_seen() { return joined(seen); }
const char* device_races() { return joined(races); }
void device_hand_out_default(bool on) { hand_out_default = on; }
void device_enter(long long stream) { current = stream; }
long long device_current() { return current; }
long long device_alive() { return alive; }
long long device_peak() { return peak; }
void device_reset_peak() { peak = alive; }
void device_limit(long long bytes) { limit = bytes; }
}
