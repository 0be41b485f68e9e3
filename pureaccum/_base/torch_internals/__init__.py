"""Every private torch name that pureaccum touches, and nothing else.

    functorch    torch.func's transforms, level by level, and torch's forward AD
    modes        who looks on: transforms, compilers, tracers, function and dispatch modes
    autograd     graphs, backward passes, hooks, versions
    kernels      one call for many tensors; memory
    module_slots where modules keep what they hold
    operations   what each operation writes to, draws and returns
    compiler     a loop in a graph, graphs of our own, errors

=================================  ======================================  ================
name                               what for                                checked in
=================================  ======================================  ================
``torch._C._functorch``            is a functorch transform active?        2.11, 2.13, 2.15
``torch._C._functorch``            what its wrappers wrap, mapped or not   2.11, 2.13, 2.15
``…functorch._add_batch_dim``      wrap what was computed below a vmap     2.13
``…functorch.CVmapInterpreterPtr`` how many members a vmap has             2.13
``…functorch._vmap_increment_…``   a vmap, and no checks                   2.13
``…functorch._grad_increment_…``   a gradient, and no trees                2.13
``torch._C.DisableTorchFunction``  look at a tensor past all modes         2.13
``…functorch.push_dynamic_...``    a tensor as an outer transform sees it  2.11, 2.13
``forward_ad._set_fwd_grad_...``   forward AD inside a Function's rules    2.11, 2.13, 2.15
``forward_ad._current_level``      is torch's forward AD going on?         2.11, 2.13
``Node._sequence_nr``              was it recorded before?                 2.11, 2.13
``Node._forward_cls``              which Function recorded it?             2.13
``torch._C._functions``            the node in which a graph ends          2.11, 2.13, 2.15
``torch._C.DisableTorchFunction``  what modes are not to see               2.11, 2.13
``torch._C._DisableTorchDispatch`` what modes are not to see               2.11, 2.13
``torch._foreach_add_``            one call for many small leaves          2.11, 2.13, 2.15
``…graph._engine_run_backward``    a backward pass, and no checks          2.11, 2.13
``torch._amp_foreach_non_finite…`` are many leaves finite?                 2.11, 2.13
``torch._foreach_norm, _div_, …``  one call for many leaves                2.11, 2.13
``torch._fused_adamw_, _adam_``    the kernels of torch.optim              2.11, 2.13
``Module._parameters, _buffers``   what a module holds during a call       2.11, 2.13, 2.15
``Module._modules``                the modules below it                    2.11, 2.13, 2.15
``RNNBase._flat_weight...``        caches that functional_call leaves      2.11, 2.13, 2.15
``Tensor._version``                was it written to in place?             2.11, 2.13, 2.15
``UntypedStorage._cdata``          do two tensors share memory?            2.11, 2.13
``Tensor._is_zerotensor``          is there no memory, but a note of zero? 2.13
``torch._C._storage_Use_Count``   does only one tensor lie in a memory?   2.11, 2.13
``OpOverload._schema``             what does an operation write to?        2.11, 2.13
``…disable_proxy_modes_tracing``   compute what no tracer writes down      2.13
``OpOverload.namespace``           does it reach other ranks?              2.13
``_len_torch_dispatch_stack``      does a dispatch mode see operations?    2.13
``_get_dispatch_stack_at``         … and is it one of ours?                2.13
``_len_torch_function_stack, …``   the same of function modes              2.13
``torch.overrides._push_mode, …``  the modes that were on once             2.13
``torch.utils._device``            is it the one of a device?              2.13
``_dispatch_tls_is_dispatch_key…`` does make_fx record above autograd?     2.13
``Tensor._backward_hooks``         the hooks on a tensor                   2.11, 2.13, 2.15
``._post_accumulate_grad_hooks``   those after its gradient is there       2.11, 2.13, 2.15
``torch._C._autograd``             may tensors be saved through hooks?     2.11, 2.13, 2.15
``nn.modules.module._global_...``  the hooks of all modules                2.11, 2.13, 2.15
``torch._higher_order_ops.scan``   a loop in compiled code                 2.11, 2.13, 2.15
``torch._dynamo``                  dims that vary; the compiler's errors   2.11, 2.13, 2.15
``torch._inductor.exc``            the compiler's errors                   2.11, 2.13, 2.15
``aten._has_same_storage_numel``   what forward AD asks of a tangent       2.13
``torch.utils._python_dispatch``   see every operation                     2.11, 2.13, 2.15
``._should_skip_dynamo``           … and import no compiler for it         2.11, 2.13
``torch._C._current_graph_task``   is a backward pass going on?            2.11, 2.13, 2.15
``torch._subclasses.fake_tensor``  tensors that hold no numbers            2.11, 2.13, 2.15
``torch.autograd._profiler_…``     is a profiler active?                   2.13
=================================  ======================================  ================

``tests/base/test_private_torch.py`` fails when one of them moves.
"""
