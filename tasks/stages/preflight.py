"""Checks a training's configuration before anything starts; errors name the field and the remedy."""

from speech.lm import NetworkConfig, check_sources
from storage.index import ShardIndex
from storage.objects import ObjectStore
from tasks.config.home import work_folder
from tasks.config.lm_training import lm_training
from tasks.dataset.manifest import iter_manifest, scratch_folder
from tasks.dataset.sets import is_trained
from tasks.orchestration.nodes_api import check_pool
from tasks.stages.base import Run, StageError, stages_of
from tasks.stages.config_check import check_devices, check_launch, check_layers, check_model, check_scored_sets
from tasks.stages.decoder_files import check_decoder_files, check_files
from tasks.stages.folds import is_tested
from tasks.stages.prepare import PREPARE
from tasks.stages.run_sets import set_url
from tasks.stages.tuning import check_tuning
from training.config import TrainConfig
from training.learner.sampling import check_weights


def run_preflight(run: Run) -> None:
    """Check that a training can work on this configuration and these machines.

    Raises:
        StageError: If it cannot; the message names the field and the remedy.
    """
    cfg = run.config.train
    # before training, so that what is missing is reported before hours of work, not after
    check_decoder_files(run.config.decode)
    for lm in filter(None, (run.config.lm, run.config.rescoring)):
        check_sources(lm)
        if isinstance(lm, NetworkConfig):
            check_devices(lm_training(run.config.lm_train))
    if run.config.lm is not None:
        check_files(run.config.lexicon, "lexicon")
    check_tuning(run)
    check_launch(cfg)
    check_devices(cfg)
    check_layers(cfg, check_model(run))
    check_shards(cfg, set_url(run, "train"))
    if cfg.launch.kind == "prefect":
        check_pool(cfg.launch.pool, run.config.name)


def check_names(run: Run) -> None:
    """Check the sets and groups that a configuration names, as soon as the stage `prepare` has found those of the data.

    Raises:
        StageError: If `score.sets` names a set that the data have not.
        SamplingError: If the weights of `train.sampling` are not those of the training set's groups.
    """
    present = sorted(PREPARE.record(run)["sets"])
    check_scored_sets(run.config, present, of_corpus=run.bundle is not None)
    sampling, data = run.config.train.sampling, run.config.data
    # copies at other speeds are made later, as other speakers
    if sampling.kind != "weights" or "train" not in stages_of(run.config) or (sampling.by == "speaker" and data.speeds):
        return
    with scratch_folder(work_folder("names", run.run_id)) as folder:
        rows = iter_manifest(run.result("prepare").store, folder, columns=["set", sampling.by])
        trained = {row[sampling.by] for row in rows if is_trained(row["set"]) and not is_tested(row["set"], data)}
    if trained:
        check_weights(sampling, trained)


def check_shards(cfg: TrainConfig, train_url: str) -> None:
    """Check that there is at least one training shard for every node, since nodes lease shards.

    Raises:
        StageError: If there are fewer.
    """
    if cfg.nodes == 1:
        return
    shards = len(ShardIndex.read(ObjectStore(train_url)).shards)
    if shards < cfg.nodes:
        raise StageError(
            f"train.nodes is {cfg.nodes} but the training set has only {shards} shard(s), and every node needs one: "
            f"lower storage.shard_seconds to get more shards, or use train.nodes={shards} or fewer"
        )
