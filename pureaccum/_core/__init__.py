"""The monoid of sums of gradients and of weights, and the primitive: a function of rows.

What a loss returns (``loss``) weighs something (``weights``); ``engines`` go forwards and back, and
``microbatch_gradient`` adds the gradient of one microbatch to sums. Over a stream that is the
``accumulator``, over a batch at hand ``whole_batch``, of which ``transforms`` makes ``grad``;
``evaluation`` has ``value``, without gradients.
``microbatch`` is the primitive, whose derivatives follow the ``rule`` and whose ``outputs`` are put
together by the words of ``reductions``; ``remat`` is the same with one piece. A function that is
run again sees what it saw (``recomputation``, ``called_modules``), and writes to nothing that is
not its own (``writes``). Results have a ``history`` that plain autograd follows. Whether
derivatives are those of the numbers is said by ``differences``.
"""

from .accumulator import NO_GRAPH as NO_GRAPH
from .accumulator import AccumState as AccumState
from .accumulator import Accumulator as Accumulator
from .accumulator import accumulator as accumulator
from .accumulator import check_belongs as check_belongs
from .accumulator import check_squares as check_squares
from .accumulator import counted as counted
from .accumulator import empty as empty
from .accumulator import in_tensors as in_tensors
from .accumulator import merged as merged
from .accumulator import plain_sum as plain_sum
from .accumulator import read_state as read_state
from .accumulator import updated as updated
from .auto_size import Live as Live
from .auto_size import Search as Search
from .auto_size import by_memory as by_memory
from .auto_size import counting as counting
from .auto_size import is_auto as is_auto
from .batches import Batch as Batch
from .batches import check_size as check_size
from .batches import check_sizes as check_sizes
from .batches import cut_batch as cut_batch
from .batches import cutting as cutting
from .batches import microbatches as microbatches
from .batches import need_rows as need_rows
from .batches import parts_of_batch as parts_of_batch
from .batches import read_batch as read_batch
from .batches import read_microbatch as read_microbatch
from .batches import refuse_in_graphs as refuse_in_graphs
from .batches import rows_to_cut as rows_to_cut
from .batches import sizes_of_batch as sizes_of_batch
from .batches import windows as windows
from .buckets import AHEAD as AHEAD
from .buckets import group_of as group_of
from .buckets import meet as meet
from .buckets import sum_over_ranks_ as sum_over_ranks_
from .called_modules import ALONE as ALONE
from .called_modules import origins as origins
from .differences import Miss as Miss
from .differences import SecondOrder as SecondOrder
from .differences import misses as misses
from .engines import Engine as Engine
from .engines import Pull as Pull
from .engines import Wrt as Wrt
from .engines import alone as alone
from .engines import as_they_are as as_they_are
from .engines import prepare as prepare
from .engines import run_window as run_window
from .evaluation import value as value
from .exchange import any_rank as any_rank
from .exchange import exchange as exchange
from .exchange import gather_one as gather_one
from .exchange import inside_of as inside_of
from .exchange import onlooker as onlooker
from .history import call_with_history as call_with_history
from .history import refusing_backward as refusing_backward
from .history import with_history as with_history
from .loss import Reduction as Reduction
from .loss import Weighted as Weighted
from .loss import advise_on_arguments as advise_on_arguments
from .loss import advising as advising
from .loss import counts as counts
from .loss import divisor as divisor
from .loss import in_one_list as in_one_list
from .loss import is_pair as is_pair
from .loss import join_aux as join_aux
from .loss import mean_value as mean_value
from .loss import read as read
from .loss import read_again as read_again
from .loss import sane as sane
from .microbatch import Keep as Keep
from .microbatch import microbatch as microbatch
from .microbatch_gradient import Nonfinite as Nonfinite
from .microbatch_gradient import Rule as Rule
from .microbatch_gradient import add_microbatch as add_microbatch
from .microbatch_gradient import check_rule as check_rule
from .precision import InDtype as InDtype
from .precision import Policy as Policy
from .precision import cast_tree as cast_tree
from .precision import under as under
from .recomputation import captures_are_sought as captures_are_sought
from .recomputation import cast as cast
from .reductions import AuxState as AuxState
from .reductions import Reducer as Reducer
from .reductions import Stack as Stack
from .reductions import check_reduce as check_reduce
from .reductions import finish_aux as finish_aux
from .reductions import fold_aux as fold_aux
from .reductions import fold_stack as fold_stack
from .reductions import is_reducer as is_reducer
from .reductions import share_of as share_of
from .reductions import stack_of_one as stack_of_one
from .remat import remat as remat
from .remat import remat_sequential as remat_sequential
from .streams import parts_of_streams as parts_of_streams
from .token_budget import Cut as Cut
from .token_budget import cut as cut
from .transforms import grad as grad
from .transforms import grad_and_value as grad_and_value
from .weights import Microbatch as Microbatch
from .weights import Tally as Tally
from .weights import Weighing as Weighing
from .weights import divided as divided
from .weights import power_of_two as power_of_two
from .weights import quotient as quotient
from .weights import scaled as scaled
from .weights import settle as settle
from .weights import term_of as term_of
from .whole_batch import Accumulated as Accumulated
from .whole_batch import Accumulation as Accumulation
from .whole_batch import CutBatch as CutBatch
from .whole_batch import LossOfPart as LossOfPart
from .whole_batch import accumulate as accumulate
from .whole_batch import read_cut as read_cut
from .writes import Given as Given
from .writes import Known as Known
from .writes import guarding as guarding
from .writes import known_of as known_of
from .writes import knows as knows
from .writes import remember as remember
from .writes import unguarded as unguarded
