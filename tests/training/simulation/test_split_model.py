"""`pipeline` on the virtual clock: the real schedules' order and makespan, what travels, and one process's weights."""

import textwrap
from unittest.mock import MagicMock, patch

import pytest
import torch
from ranks import run_ranks
from regression import Regression
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from training.simulation import Activations, Cluster, MembershipChange, Timing, simulate
from training.simulation.pipeline import Pass, schedule
from training.strategies.base import StrategyError
from training.strategies.blocks import MaConfig
from training.strategies.pipeline import LayerPipelineConfig
from training.strategies.registry import STRATEGIES, find_method

FREE = {"link_gbit": 1e9, "link_ms": 0.0}
KINDS = ["gpipe", "1f1b"]


def seconds(learners, micro_batches, kind, problem=None, **cluster):
    """Virtual seconds of a step."""
    config = LayerPipelineConfig(micro_batches=micro_batches, schedule=kind)
    problem = problem or Timing(batches=3 * learners)
    outcome = simulate(Cluster(learners=learners, **cluster), "pipeline", problem, config)
    return outcome.epoch_s * learners / problem.batches


# --- what is done when


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (3, 3), (4, 7), (5, 8)])
def test_passes_follow_the_order_of_torch_schedules(kind, stages, micro_batches):
    """torch's own loop, with a stage that records its calls and communicates with no other stage."""
    for number in range(stages):
        told = []
        stage = MagicMock(num_stages=stages, stage_index=number, is_last=number == stages - 1)
        stage.forward_one_chunk.side_effect = lambda n, *_, told=told, **__: told.append(Pass(True, n))
        stage.backward_one_chunk.side_effect = lambda n, *_, told=told, **__: told.append(Pass(False, n))
        for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
            getattr(stage, name).return_value = []
        torchs = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind](stage, micro_batches)
        with patch.object(torchs, "_initialize_stage"):
            torchs._step_microbatches([()] * micro_batches, [{}] * micro_batches)
        assert schedule(kind, number, stages, micro_batches) == told


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 5), (2, 4), (4, 4), (4, 13), (8, 32)])
def test_equal_stages_without_link_costs_match_the_closed_form(kind, stages, micro_batches):
    """(M + N - 1) / M of a step (arXiv:1811.06965, 2006.09503): what is above 1 is filled and drained."""
    expected = 0.1 * (micro_batches + stages - 1) / micro_batches
    assert seconds(stages, micro_batches, kind, **FREE) == pytest.approx(expected)


@pytest.mark.parametrize("place", [0, 2, 3])
def test_slow_stage_is_always_busy_while_others_fill_and_drain(place):
    expected = 0.1 * (8 * 5 + 4 - 1) / 8
    assert seconds(4, 8, "gpipe", slow={place: 5.0}, **FREE) == pytest.approx(expected)
    assert seconds(4, 8, "1f1b", slow={place: 5.0}, **FREE) >= 0.1 * 5


def test_1f1b_with_fewer_micro_batches_than_stages_is_gpipe():
    """As in the engine: torch's schedule refuses them."""
    for links in (FREE, {"link_ms": 20.0}):
        assert seconds(4, 3, "1f1b", **links) == seconds(4, 3, "gpipe", **links)
    assert seconds(4, 4, "1f1b", link_ms=20.0) > seconds(4, 4, "gpipe", link_ms=20.0)


def test_batch_has_no_more_micro_batches_than_utterances():
    class Known(Timing):
        def activations(self, stages):
            return Activations(0.0, utterances=3)

    assert seconds(2, 100, "gpipe", Known(batches=6), **FREE) == pytest.approx(0.1 * 7 / 6)
    # of six utterances, four micro-batches of two would be one too many
    assert seconds(2, 4, "gpipe", Known(batches=6), **FREE) == pytest.approx(0.1 * 4 / 3)


def test_overhead_and_jitter_lengthen_a_step():
    assert seconds(2, 4, "gpipe", overhead_s=0.05, **FREE) == pytest.approx(0.15 * 5 / 4)
    first, other, even = (seconds(4, 8, "1f1b", jitter=jitter, **FREE) for jitter in (0.3, 0.3, 0.0))
    assert first == other > 1.05 * even


def test_last_step_with_fewer_batches_is_proportionally_shorter():
    whole, more = (
        simulate(Cluster(learners=4, **FREE), "pipeline", Timing(batches=batches)).seconds for batches in (8, 9)
    )
    assert more == pytest.approx(whole * (1 + 0.25 / 2))


# --- what travels


@pytest.mark.parametrize(("per_machine", "message_s"), [(1, 0.2 + 1e-3), (2, 0.02 + 1e-5)])
def test_hidden_frames_and_their_gradients_are_sent_once_each(per_machine, message_s):
    """Two stages and one micro-batch: forward, across, forward and backward, across, backward."""
    cluster = {"link_gbit": 8, "link_ms": 1, "local_gbit": 80, "per_machine": per_machine}
    problem = Timing(batches=2, border_bytes=1e8)  # of each of two learners' batches
    for kind in KINDS:
        assert seconds(2, 1, kind, problem, **cluster) == pytest.approx(0.2 + 2 * message_s)


def test_1f1b_waits_for_three_messages_and_gpipe_for_two():
    """Two stages, two micro-batches, worked out by hand: gpipe has two messages on its critical path, 1f1b three."""
    for kind, messages in (("gpipe", 2), ("1f1b", 3)):
        assert seconds(2, 2, kind, link_gbit=1e9, link_ms=5) == pytest.approx(0.1 * 3 / 2 + messages * 5e-3)


def test_next_micro_batch_waits_for_a_busy_link():
    """Two stages, two micro-batches: a message takes longer than a forward pass (a third) and less than a backward one.

    Worked out by hand: forward, two messages one after the other, forward, two passes back, a message, a pass back.
    """
    forward_s, backward_s, message_s = 0.05, 0.1, 0.08
    problem = Timing(batches=2, border_bytes=1e7)
    expected = 2 * forward_s + 3 * message_s + 3 * backward_s
    assert seconds(2, 2, "gpipe", problem, step_s=0.3, link_gbit=1, link_ms=0) == pytest.approx(expected)


def test_micro_batches_hide_communication():
    problem = Timing(batches=8, border_bytes=1e7)
    whole, many = (seconds(4, count, "gpipe", problem, link_gbit=10) for count in (1, 32))
    message_s = 4 * 1e7 * 8 / 10e9
    assert whole == pytest.approx(0.4 + 6 * message_s, rel=1e-2)
    assert many < 0.1 * 35 / 32 + 2 * message_s


@pytest.mark.parametrize("learners", [1, 2, 8])
def test_bytes_sent_match_the_strategy_facts(learners):
    cluster = Cluster(learners=learners, per_machine=min(2, learners))
    outcome = simulate(cluster, "pipeline", Timing(batches=4 * learners, border_bytes=1e6))
    facts = STRATEGIES["pipeline"].facts
    assert outcome.bytes_per_step == pytest.approx(facts.sent(learners, 1e6, LayerPipelineConfig()))
    # a machine in the midst of others sends forward and back
    assert outcome.bytes_per_nic == pytest.approx(4 * learners * 1e6 * (2 if learners > 4 else learners > 2))


# --- what is learned


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("batches", [24, 25])
def test_the_weights_are_those_of_synchronous_sgd(momentum, batches):
    class Annealed(Regression):
        def rate(self, progress):
            return 0.2 / (1 + progress)

    passes = []
    for strategy in ("pipeline", "scpsgd"):
        problem = Annealed(batches=batches, epochs=2, momentum=momentum)
        passes.append(simulate(Cluster(learners=4), strategy, problem))
        assert sorted(problem.seen) == [(epoch, number) for epoch in range(2) for number in range(batches)]
    torch.testing.assert_close(passes[0].weights, passes[1].weights, rtol=1e-5, atol=1e-6)
    row = passes[0].row("none", 2.4)
    assert set(row) == set(passes[1].row("none", 2.4))
    assert (row["strategy"], row["staleness"], row["consensus"]) == ("pipeline", 0, 0)
    assert row["loss"] == pytest.approx(passes[1].figures["loss"], rel=1e-4)
    first = 4 * -(-batches // 4) / batches  # the step that ends the first epoch
    assert [look["epochs"] for look in passes[0].curve()] == pytest.approx([first, 2, 2])


def test_single_learner_is_plain_sgd():
    problem = Regression(epochs=2)
    outcome = simulate(Cluster(learners=1), "pipeline", problem)
    torch.testing.assert_close(outcome.weights, problem.alone(), rtol=0, atol=1e-6)
    assert outcome.bytes_per_step == 0


def test_empty_batches_change_nothing():
    class Empty(Regression):
        def gradients(self, jobs):
            super().gradients(jobs)
            return [0.0] * len(jobs)

    problem = Empty(batches=4, momentum=0.9)
    assert torch.equal(simulate(Cluster(learners=2), "pipeline", problem).weights, problem.replica().weights)


# --- what is refused


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"losses": (MembershipChange(rank=1, at_s=1.0),)}, "a pipeline that loses one of its stages .* cannot train"),
        ({"joins": (MembershipChange(rank=1, at_s=1.0),)}, "a pipeline that waits for one of its stages"),
    ],
)
def test_pipeline_with_joining_or_lost_stages_is_refused(cluster, message):
    with pytest.raises(StrategyError, match=message):
        simulate(Cluster(**cluster), "pipeline", Timing(8))


def test_constants_of_another_strategy_are_refused():
    with pytest.raises(StrategyError, match="pipeline is configured by a LayerPipelineConfig, not MaConfig"):
        simulate(Cluster(), "pipeline", Timing(8), MaConfig())


def test_pipeline_learners_have_no_programs():
    with pytest.raises(StrategyError, match="learners of pipeline have no program: choose one of scpsgd"):
        find_method("pipeline")


# --- beside real processes

PROGRAM = textwrap.dedent(
    """
    import os, sys, time
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
    from training.node.process_group import NodeGroup

    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    parts, pass_s = int(sys.argv[4]), [float(word) for word in sys.argv[5:]][rank]
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    group = NodeGroup(rank, size, folder / "meet", cpu)

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            time.sleep(pass_s / 3)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(2 * pass_s / 3)
            return grad

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(4))

        def forward(self, x):
            return Waits.apply(x * self.scale)

    x = torch.ones(parts, 4)
    for kind, name in ((ScheduleGPipe, "gpipe"), (Schedule1F1B, "1f1b")):
        found = []
        for _ in range(4):  # the first one connects the processes
            stage = PipelineStage(Layer(), rank, size, cpu, input_args=x[:1], output_args=x[:1])
            schedule = kind(stage, parts, lambda out, _: out.sum(), scale_grads=False)
            dist.barrier()
            began = time.monotonic()
            schedule.step(*([x] if rank == 0 else []), target=x, losses=[], return_outputs=False)
            found.append(time.monotonic() - began)
        if rank == 0:  # the first stage has the last pass
            (folder / name).write_text(str(min(found[1:])))
    group.close()
    print("fine", flush=True)
    os._exit(0)
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("slow", [{}, {1: 3.0}, {2: 3.0}], ids=["even", "middle", "last"])
def test_no_real_schedule_is_faster_than_the_simulated_one(tmp_path, slow):
    """Three processes whose passes are waits, in torch's own schedules: a busy machine can only slow them down."""
    parts, step_s = 6, 0.6
    pass_s = [step_s / parts * slow.get(stage, 1.0) for stage in range(3)]
    run_ranks(PROGRAM, 3, tmp_path, str(parts), *map(str, pass_s))
    for kind in KINDS:
        expected = seconds(3, parts, kind, step_s=step_s, slow=slow, **FREE)
        assert float((tmp_path / kind).read_text()) > 0.95 * expected, kind
