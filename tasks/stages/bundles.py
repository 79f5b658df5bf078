"""Local copies of trained models, with the GMM-HMM of the stage align if their features are adapted to speakers."""

import tempfile
from pathlib import Path
from typing import Any

from configurable.addresses import address_content
from recognition.adaptation import add_adaptation
from speech.hmm.adapted import AdaptedFeatures
from speech.hmm.config import AdaptationConfig
from storage.objects import ObjectStore
from storage.stages import StageOutput
from tasks.stages.align import AlignmentModel, config_of
from tasks.stages.base import Run
from tasks.stages.ivectors import EXTRACTOR


def fetch_bundle(source: ObjectStore | StageOutput, folder: Path) -> Path:
    """Copy a trained model's bundle into a local folder.

    Args:
        source: Store of the bundle, or output of a training, whose files are checked against its record.
        folder: The local folder.

    Raises:
        DamagedObjectError: If a file differs from the record.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model.safetensors", "bundle.json"):
        (folder / name).write_bytes(source.read(f"model/{name}"))
    return folder


def own_bundle(run: Run, folder: Path) -> Path:
    """Copy the run's trained model into a local folder, with the GMM-HMM if its features are adapted to speakers."""
    bundle, source = fetch_bundle(run.result("train").output, folder), adaptation_source(run)
    return adapt_bundle(bundle, **source) if source else bundle


def adaptation_source(run: Run) -> dict[str, Any] | None:
    """Arguments of `adapt_bundle` for a run that trains on adapted features; None for others."""
    if not run.config.features.adapted or run.bundle is not None:
        return None
    align = config_of(run)
    search = align.recognize.model_copy(update={"arpa": ""})  # the graph is the network's
    adaptation = AdaptationConfig(features=align.features, search=search)
    source = {"align": run.result("align").url, "adaptation": adaptation.model_dump(mode="json")}
    return source | ({"adapt": run.result("adapt").url} if _has_ivectors(run) else {})


def _has_ivectors(run: Run) -> bool:
    """Whether there are i-vectors among the features, whose extractor the stage adapt has estimated."""
    return AdaptedFeatures.ivector_part(run.config.features) is not None


def adaptation_inputs(run: Run) -> tuple[dict[str, Any], dict[str, str]]:
    """What adaptation adds to the configuration and the input digests of the stage decode."""
    if adaptation_source(run) is None:
        return {}, {}
    search = address_content(config_of(run).recognize, without=("arpa",))
    digests = {"adaptation": run.result("align").key}
    return {"adaptation": search}, digests | ({"ivectors": run.result("adapt").key} if _has_ivectors(run) else {})


def adapt_bundle(folder: Path, align: str, adaptation: dict[str, Any], adapt: str = "") -> Path:
    """Give a bundle the GMM-HMM of the stage align; returns the bundle's folder.

    Args:
        folder: The bundle.
        align: URL of the stage's output.
        adaptation: How the GMM-HMM is used.
        adapt: URL of the output of the stage adapt, which has the extractor of i-vectors, if the features have some.
    """
    with tempfile.TemporaryDirectory() as local:
        AlignmentModel.fetch(StageOutput.at(align), Path(local))
        ivector = StageOutput.at(adapt).fetch(EXTRACTOR, Path(local)) if adapt else None
        add_adaptation(folder, Path(local) / "model", AdaptationConfig.model_validate(adaptation), ivector)
    return folder
