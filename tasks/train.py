"""Stage 4, train: tokens from the training transcripts, then training in a process of its own."""

import hashlib
from typing import Any

from speech.bundle import BundleSpec
from speech.tokens import train_tokenizer
from storage.index import ShardIndex
from storage.objects import ObjectStore
from storage.stages import StageOutput, digest_json
from tasks import progress
from tasks.features import set_digest, set_url
from tasks.home import home
from tasks.stage import Inputs, Run, Stage, StageError
from training.job import TrainJob
from training.journal import JournalTail
from training.launch import run_training

# they change how training proceeds, not what it makes
_NOT_CONTENT = {"threads", "checkpoint_steps", "checkpoint_keep", "log_steps"}


def _inputs(run: Run) -> Inputs:
    config = run.config
    shards = run.result("shard").record["sets"]
    if "valid" not in shards:
        raise StageError(
            "there is no validation set: give a source `set: valid`, or leave one without a set and give "
            "data.valid_share a share above 0"
        )
    content = {
        "train": config.train.model_dump(mode="json", exclude=_NOT_CONTENT),
        "model": config.model.model_dump(mode="json"),
        "tokens": config.tokens.model_dump(mode="json"),
        "features": config.features.model_dump(mode="json"),
        "normalizer": config.data.normalizer.model_dump(mode="json"),
        "sample_rate": config.data.sample_rate,
        "seed": config.seed,
    }
    # what the training reads, not where the features stage left it: a forced rerun with the same result changes nothing
    stats = {name: run.result("features").record[name] for name in ("stats", "speakers")}
    digests = {"stats": digest_json(stats)} | {name: set_digest(run, name) for name in ("train", "valid")}
    return content, digests


def make_job(run: Run, output: StageOutput) -> TrainJob:
    """The training job of a run; the tokens come from the training transcripts."""
    config, features = run.config, run.result("features").record
    texts = ShardIndex.read(run.result("shard").store.child("train")).column("text")
    tokenizer = train_tokenizer(config.tokens, texts)
    spec = BundleSpec(
        sample_rate=config.data.sample_rate,
        features=config.features.model_copy(update={"stored": False}),
        stats=features["stats"],
        tokenizer=tokenizer.to_dict(),
        model=config.model,
        normalizer=config.data.normalizer,
        provenance={"name": config.name, "train": set_digest(run, "train"), "valid": set_digest(run, "valid")},
    )
    work = home() / "work" / f"train-{output.key}"
    return TrainJob(
        run=output.key,
        seed=config.seed,
        train=config.train,
        spec=spec,
        speakers=features["speakers"],
        train_url=set_url(run, "train"),
        valid_url=set_url(run, "valid"),
        output_url=output.store.url,
        journal=work / "journal.jsonl",
        cache=run.cache_folder,
    )


class _Reporter:
    """Turns new journal lines into progress reports."""

    def __init__(self, job: TrainJob) -> None:
        self.tail = JournalTail(job.journal)

    def __call__(self) -> None:
        for entry in self.tail.new_entries():
            if entry["kind"] == "step":
                note = f"loss {entry['loss']:.3f}, lr {entry['lr']:.2e}"
                progress.report("train", entry["epoch"], entry["epochs"], note)
            elif entry["kind"] == "valid":
                note = f"validation loss {entry['valid_loss']:.3f}, WER {entry['valid_wer']:.1%}"
                progress.report("train", entry["epoch"], entry["epochs"], note)


def _work(run: Run, output: StageOutput) -> dict[str, Any]:
    if output.store.url.startswith("memory:"):
        raise StageError(
            "storage.url is memory://, which the training process cannot see: use a folder or s3:// (memory:// serves "
            "sharding and features only)"
        )
    job = make_job(run, output)
    if run.forced("train"):
        job.journal.unlink(missing_ok=True)
    run_training(job, job.journal.parent, _Reporter(job))
    store = output.store
    result = store.read_json("result.json")
    # the journal moves beside the model: whoever has the object store has the learning curves
    store.write_file("journal.jsonl", job.journal)
    for folder in ("checkpoints", "snapshots"):
        store.delete_tree(folder)
    return {
        "counts": {
            "epochs": result["epoch"],
            "steps": result["step"],
            "utterances": result["utterances"],
            "unalignable": result["unalignable"],
        },
        "result": result,
        "digest": model_digest(store),
    }


def model_digest(store: ObjectStore) -> str:
    """SHA-256 over a model's two files."""
    both = hashlib.sha256(store.read("model/model.safetensors"))
    both.update(store.read("model/bundle.json"))
    return both.hexdigest()


TRAIN = Stage("train", 1, _inputs, _work)
