"""A server for one recognizer: files over HTTP as OpenAI's API defines it, streams over a WebSocket.

    switch = ModelSwitch("digits", LoadedModel("digits", "3", Transcriber(folder)))
    DrainingServer(Service(switch, ServeLimits(), token=None, log=RequestLog())).serve("127.0.0.1", 8000)

`queue` recognizes the waiting requests in batches, `models` replaces the model while it is in use, `app` answers
requests, `streams` those over WebSockets, `gate` refuses what must not get in, `connections` guards the sockets.
"""
