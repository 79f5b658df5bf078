"""Hidden Markov models with Gaussian mixtures: training, alignment, and decoding with a graph.

    trainer = Trainer(utterances, lexicon, HmmConfig(), Path("work"), progress=print)
    result = trainer.run("sat")                       # model, alignments, speakers' transforms

    aligned = Aligner(result.model, lexicon).align(make_shards(others))

    words = word_graph(result.model.tree.phones, lexicon, Path("lm.arpa"))
    decoder = GraphSearch(words.decoding_graph(result.model), words.words)
    passes = decode_speaker(result.model, decoder, features)

See docs/hybrid.md.
"""
