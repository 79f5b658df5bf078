"""Training of language models that are networks, by the engine, within the stage lm.

The text is numbered and written to shards in the stage's output, in blocks of whole sentences. Training leaves its
checkpoints beside them, so that the stage continues where it was killed; both are removed once the model is published.
"""

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recognition.systems.language_model import LanguageModelTaskConfig
from speech.lm import LmSpec, NetworkConfig, NumberedText, Units, Vocabulary, unit_of
from speech.lm.vocabulary import END_ID, START_ID
from speech.tokens import TokenError, Tokenizer
from storage.index import INDEX_NAME, ShardIndex
from storage.objects import ObjectStore
from storage.shards import Sample, build_index, load_part, write_shard
from storage.stages import StageOutput
from tasks.config.home import work_folder
from tasks.config.lm_training import LmTrainConfig, lm_training
from tasks.config.training import training_content
from tasks.dataset.sets import VALID
from tasks.dataset.splits import TRAIN
from tasks.engine import know_tasks
from tasks.locking.slots import training_slot
from tasks.stages import progress
from tasks.stages.base import Run, StageError
from tasks.stages.reporter import Reporter
from tasks.stages.shard import set_texts
from training.job import TrainJob
from training.launch.training_process import run_training

_TEXT, _TRAINING = "text", "training"
_BLOCK_WORDS = 256
"""Greatest length of a block, special words included, unless a single sentence is longer."""
_SHARD_WORDS = 1_000_000
Numbers = NDArray[np.int64]


def network_content(run: Run) -> dict[str, Any]:
    """What affects a network besides the section `lm` and the text; nothing for other language models."""
    if not isinstance(run.config.lm, NetworkConfig):
        return {}
    return {"train": training_content(lm_training(run.config.lm_train)), "seed": run.config.seed}


class EngineTrainer:
    """Trains a network with the strategies, checkpoints and devices of `lm_train`.

    Args:
        run: The run.
        output: Output of its stage lm.
        tokenizer: The acoustic model's, for models of its tokens.
    """

    def __init__(self, run: Run, output: StageOutput, tokenizer: Tokenizer | None) -> None:
        self.run, self.output, self.tokenizer = run, output, tokenizer
        self.cfg: LmTrainConfig = lm_training(run.config.lm_train)

    def __call__(self, spec: LmSpec, text: NumberedText, folder: Path) -> dict[str, Any]:
        """Train, as `speech.lm.NetworkTrainer` says; continues a training that was killed.

        Raises:
            StageError: There is no validation set, or less text than the nodes need.
        """
        if self.output.store.url.startswith("memory:"):
            raise StageError("storage.url is memory://, which the training process cannot see: use a folder or s3://")
        job = self._job(spec, text)
        if self.run.forced(self.output.stage):
            job.journal.unlink(missing_ok=True)
        say = partial(progress.announce, self.output.stage)
        with training_slot(self.run.config, self.run.holder, say):
            know_tasks()
            run_training(job, job.journal.parent, Reporter(job.journal, self.cfg.nodes, self.output.stage))
        trained = ObjectStore(job.output_url)
        for name in spec.members:
            (folder / name).write_bytes(trained.read(f"model/{name}"))
        result = trained.read_json("result.json")
        facts = {name: result[name] for name in ("epoch", "step", "strategy", "nodes", "learners_per_node", "device")}
        return facts | {"valid_loss": result["valid"]["loss"], "averaged_epochs": result["averaged_epochs"]}

    def clear(self) -> None:
        """Remove the text and the checkpoints from the stage's output."""
        for folder in (_TEXT, _TRAINING):
            self.output.store.delete_tree(folder)

    def _job(self, spec: LmSpec, text: NumberedText) -> TrainJob:
        run, sets = self.run, self.output.store.child(_TEXT)
        # enough shards for nodes to share, since they lease whole ones
        shard_words = max(_BLOCK_WORDS, min(_SHARD_WORDS, text.encoded.counts["tokens"] // (4 * self.cfg.nodes)))
        index = write_text(sets.child(TRAIN), text.blocks(), shard_words)
        if len(index.shards) < self.cfg.nodes:
            raise StageError(
                f"lm_train.nodes is {self.cfg.nodes}, but the text of the language model makes only "
                f"{len(index.shards)} shard(s), and every node needs one: use fewer nodes, or add text in lm.text"
            )
        write_text(sets.child(VALID), self._held_out(spec), _SHARD_WORDS)
        return TrainJob(
            run=self.output.key,
            seed=run.config.seed,
            train=self.cfg.engine_part(),
            task=LanguageModelTaskConfig(
                spec=spec.model_copy(update={"provenance": {"name": run.config.name}}),
                train_url=sets.child(TRAIN).url,
                valid_url=sets.child(VALID).url,
            ),
            output_url=self.output.store.child(_TRAINING).url,
            journal=work_folder("lm-train", self.output.key) / "journal.jsonl",
            cache=run.cache_folder,
            cache_bytes=int(run.config.storage.cache_gb * 1e9),
        )

    def _held_out(self, spec: LmSpec) -> Iterator[Numbers]:
        """Each transcript of the validation set as numbers.

        Raises:
            StageError: There is none.
        """
        units, words, some = Units(unit_of(spec.network), self.tokenizer), Vocabulary(spec.words), False
        for line in set_texts(self.run, VALID):
            try:
                numbers = words.indices(units(line))
            except TokenError:
                continue
            some = True
            yield np.concatenate([[START_ID], numbers, [END_ID]])
        if not some:
            raise StageError(
                f"lm.kind {spec.network.kind} is trained until the validation set's loss is lowest, and there is no "
                "transcript in it: raise data.valid_share"
            )


@contextmanager
def engine_trainer(run: Run, output: StageOutput, tokenizer: Tokenizer | None) -> Iterator[EngineTrainer | None]:
    """The trainer of a run's language model, None for models that need none; removes its files after success."""
    if not isinstance(run.config.lm, NetworkConfig):
        yield None
        return
    trainer = EngineTrainer(run, output, tokenizer)
    yield trainer
    trainer.clear()


def write_text(store: ObjectStore, blocks: Iterable[Numbers], shard_words: int) -> ShardIndex:
    """Write numbered sentences to shards; shards that exist already stay.

    Args:
        store: Where the shards and the index go.
        blocks: Numbers `<s> w w </s> <s> w …`, whole sentences.
        shard_words: Greatest length of a shard, special words included, unless a single block is longer.
    """
    if store.exists(INDEX_NAME):
        return ShardIndex.read(store)
    parts = []
    for number, samples in enumerate(_shards(blocks, shard_words)):
        name = f"{number:06d}.tar"
        parts.append(load_part(store, name) or write_shard(store, name, samples, "npy"))
    index = build_index(parts, {})
    index.write(store)
    return index


def _shards(blocks: Iterable[Numbers], shard_words: int) -> Iterator[list[Sample]]:
    samples: list[Sample] = []
    words = total = 0
    for piece in _pieces(blocks):
        if samples and words + len(piece) > shard_words:
            yield samples
            samples, words = [], 0
        data = io.BytesIO()
        np.save(data, piece[:, None].astype(np.int32), allow_pickle=False)
        row = {"duration": len(piece), "num_frames": len(piece), "sample_rate": 1}
        samples.append(Sample(f"{total:010d}", {"npy": data.getvalue()}, row))
        words, total = words + len(piece), total + 1
    if samples:
        yield samples


def _pieces(blocks: Iterable[Numbers]) -> Iterator[Numbers]:
    """Yields runs of whole sentences of at most `_BLOCK_WORDS`, and longer sentences alone."""
    for block in blocks:
        ends = np.flatnonzero(block == END_ID) + 1
        start = last = 0
        for end in ends.tolist():
            if end - start > _BLOCK_WORDS and last > start:
                yield block[start:last]
                start = last
            last = end
        if last > start:
            yield block[start:last]
