"""With another number of nodes, a resumed training counted the steps of its nodes from the first one again.

The next resume then took the steps of the first session for void: the journal's readers dropped their lines.
"""


def test_nodes_count_their_steps_on(tones, corpus, tmp_path):
    tones.train_here(corpus.job(tmp_path, max_batch=4, checkpoint_steps=1000), stop_at=6)
    member = {"beat_s": 0.05, "start_patience_s": 0.1}
    job = corpus.job(
        tmp_path, max_batch=8, checkpoint_steps=1000, nodes=2, strategy={"kind": "adpsgd"}, membership=member
    )
    for step in (9, 11):  # with one of two nodes
        run = tones.train_here(job, stop_at=step)
        assert run.worker.step == step
        assert [entry["step"] for entry in run.entries("step")] == [*range(1, step + 1)]
