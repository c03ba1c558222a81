"""What is scheduled where passes are fixed: no clock, no company and no cut decides it."""

from mlx_provider.engine.scheduling.chunking import FixedShapes
from mlx_provider.engine.scheduling.costs import Costs
from mlx_provider.engine.scheduling.ledger import Limits
from mlx_provider.engine.scheduling.scheduler import Scheduler
from mlx_provider.testing.driver import TokenLedger, new_request


def scheduler(shapes: FixedShapes) -> Scheduler:
    limits = Limits(64, 100, 0.1, shapes.tokens, 64)
    return Scheduler(TokenLedger(limits), Costs(), grid=64, fixed=shapes)


def test_fixed_pass_sizes_depend_only_on_limits_and_prompt_position() -> None:
    shapes = FixedShapes.within(max_rows=64, max_chunk=100)
    assert (shapes.rows, shapes.tokens) == (8, 100)
    assert FixedShapes.within(max_rows=2, max_chunk=2048) == FixedShapes(2, 256)
    assert [shapes.size(done, 250) for done in (0, 100, 200, 240)] == [100, 100, 50, 10]
    assert [shapes.whole(n) for n in (99, 100, 250)] == [0, 100, 200]


def test_fixed_chunks_ignore_snapshot_points_and_measured_times() -> None:
    plan = scheduler(FixedShapes(8, 16))
    job = plan.submit(new_request(range(20, 70)), 0.0)
    job.admitted, job.cache, job.cuts = True, [], [5, 21]
    sizes = []
    while job.computed_tokens < len(job.tokens):
        chunk = plan.schedule(0.0).plan.chunk
        sizes.append(chunk.size)
        job.computed_tokens = chunk.stop
        plan.costs.pace["chunk"] *= 1000
    assert sizes == [16, 16, 16, 2]


def test_a_restarted_row_prefills_only_its_prompt() -> None:
    plan = scheduler(FixedShapes(8, 16))
    request = new_request(range(20, 70))
    (row,) = request.rows
    for again in (plan.preempt_row, lambda row: plan.retry_rows([row])[0]):
        plan.running[row] = None
        row.tokens = [7, 8, 9]
        assert again(row).tokens == request.prompt.tokens


def test_a_fixed_pass_is_charged_as_a_full_one() -> None:
    plan = scheduler(FixedShapes(8, 16))
    (row,) = new_request([1] * 9).rows
    plan.running[row] = None
    full = plan.costs.pass_of(8, row.length)
    assert plan.schedule(0.0).plan.pass_seconds == full > plan.costs.pass_of(1, row.length)
