"""Hidden Markov models with Gaussian mixtures: training, alignment, and decoding with a graph.

    trainer = Trainer(utterances, lexicon, HmmConfig(), Path("work"), progress=print)
    result = trainer.run("sat")                       # model, alignments, speakers' transforms

    lexicon_part = lexicon_fst(phones, lexicon, words)
    lg = compose_lexicon(lexicon_part, grammar(Path("lm.arpa"), words))
    graph = decoding_graph(lg, lexicon_part.symbols, result.model.tree, result.model.transitions)
    decoder = GraphDecoder(graph.constant(), words)
    passes = decode_speaker(result.model, decoder, features)

See docs/hybrid.md.
"""
