"""What features of the speaker-adapted GMM-HMM need of the rest of a configuration."""

from recognition.system import SystemConfig
from speech.features import FeatureConfig, FmllrConfig, IvectorConfig
from speech.hmm.config import AlignConfig
from speech.objectives import ObjectiveConfig


def check_features(
    features: FeatureConfig, align: AlignConfig | None, system: SystemConfig, objective: ObjectiveConfig
) -> None:
    """Check that adapted features have the GMM-HMM that makes them, and that a graph decodes what is trained on them.

    Raises:
        ValueError: If not; the message names the field and the remedy.
    """
    if not features.adapted:
        return
    kind = f"features.kind is {features.kind}"
    if align is None or align.stage != "sat":
        given = "there is no section align" if align is None else f"align.stage is {align.stage}"
        raise ValueError(f"{kind}, which needs a speaker-adapted GMM-HMM, but {given}: set align: {{stage: sat}}")
    if isinstance(features, IvectorConfig):
        raise ValueError(f"{kind}, the same in all frames of a speaker: use kind appended, with it as one of the parts")
    for part in features.components:
        if isinstance(part, FmllrConfig) and part.dim != align.lda_dim:
            field = "features.dim" if part is features else "the dim of its part fmllr"
            raise ValueError(
                f"{kind} with {part.dim} features of fMLLR, but align.lda_dim is {align.lda_dim}: set {field} to "
                f"{align.lda_dim}"
            )
        if not part.adapted and part.frame_ms != align.features.frame_ms:
            raise ValueError(
                f"{kind} with a part {part.kind} of frames of {part.frame_ms:g} ms, but align.features.frame_ms is "
                f"{align.features.frame_ms:g}, so their numbers of frames differ: set both to the same"
            )
    if features.hop_ms != align.features.hop_ms:
        raise ValueError(
            f"{kind} with a frame every {features.hop_ms:g} ms, but align.features.hop_ms is "
            f"{align.features.hop_ms:g}: set features.hop_ms to {align.features.hop_ms:g}"
        )
    if system.is_trained and system.targets != "states":
        raise ValueError(
            f"{kind}, which recognition adapts by decoding with the GMM-HMM's graph, but a recognizer of kind "
            f"{system.kind} does not have its states: set train.objective to frame_cross_entropy"
        )
    if objective.alignments_folder:
        raise ValueError(
            f"{kind}, made by the GMM-HMM of the section align, but train.objective.alignments names alignments of "
            "another one: remove train.objective.alignments"
        )
