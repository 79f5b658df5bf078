"""Local copies of a run's recognizer: its network, and the GMM-HMM that adapts features or recognizes by itself."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configurable.addresses import address_content
from recognition.adaptation import add_adaptation, save_gmm
from recognition.bundle import BundleSpec, add_decoder
from speech.hmm.adapted import AdaptedFeatures
from speech.hmm.config import AdaptationConfig
from storage.objects import ObjectStore
from storage.stages import StageOutput
from tasks.stages.align import AlignmentModel, config_of
from tasks.stages.base import Run
from tasks.stages.decoder_files import decoder_of
from tasks.stages.ivectors import EXTRACTOR
from tasks.stages.train import TRAIN


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
    """Write the bundle of the run's own recognizer into a local folder; returns the folder."""
    return make_bundle(bundle_source(run), folder)


def complete_bundle(run: Run, folder: Path) -> Path:
    """The same bundle with the decoding parameters and files that this run's hypotheses are made with."""
    own_bundle(run, folder)
    add_decoder(folder, decoder_of(run))
    return folder


def bundle_source(run: Run) -> dict[str, Any]:
    """What `make_bundle` makes the bundle of the run's own recognizer from, as JSON: workers make copies of it."""
    if run.config.system.is_trained:
        model = {"model": run.result("train").url, "digest": TRAIN.record(run)["digest"]}
        return model | (adaptation_source(run) or {})
    align = config_of(run)
    spec = BundleSpec(
        sample_rate=run.config.data.sample_rate,
        features=align.features,
        stats=None,
        tokenizer=None,
        model=None,
        normalizer=run.config.data.normalizer,
        provenance={"name": run.config.name},
        adaptation=AdaptationConfig(features=align.features, search=align.recognize.model_copy(update={"arpa": ""})),
        system=run.config.system,
    )
    return {"spec": spec.model_dump(mode="json"), "align": run.result("align").url}


def make_bundle(source: Mapping[str, Any], folder: Path) -> Path:
    """Write a bundle into a local folder; returns the folder.

    Args:
        source: What `bundle_source` gives.
        folder: The folder.
    """
    if "model" in source:
        fetch_bundle(StageOutput.at(source["model"]), folder)
    if "align" not in source:
        return folder
    with tempfile.TemporaryDirectory() as local:
        AlignmentModel.fetch(StageOutput.at(source["align"]), Path(local))
        hmm = Path(local) / "model"
        if "spec" in source:
            save_gmm(folder, BundleSpec.model_validate(source["spec"]), hmm)
            return folder
        adapt = source.get("adapt")
        ivector = StageOutput.at(adapt).fetch(EXTRACTOR, Path(local)) if adapt else None
        add_adaptation(folder, hmm, AdaptationConfig.model_validate(source["adaptation"]), ivector)
    return folder


def adaptation_source(run: Run) -> dict[str, Any] | None:
    """What a bundle's source says of adaptation, for a run that trains on adapted features; None for others."""
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
