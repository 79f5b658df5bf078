"""A server for one recognizer: files over HTTP as OpenAI's API defines it, streams over a WebSocket.

    switch = ModelSwitch("digits", LoadedModel("3", Transcriber(folder)))
    service = SpeechService(switch, log=RequestLog(Path("requests.jsonl")))
    DrainingServer(create_app(service), service).run_on(listen("127.0.0.1", 8000))

`queue` recognizes the waiting requests in batches, `models` replaces the model while it is in use, `app` answers
requests, `streams` those over WebSockets, `gate` refuses what must not get in, `connections` guards the sockets,
`collecting` keeps doubtful utterances for people to transcribe.
"""
