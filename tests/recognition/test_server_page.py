"""The page in a browser with a microphone that plays a file: a file that is dropped, and speech."""

import base64
import itertools
import json
import shutil
import subprocess

import numpy as np
import pytest
import soundfile
from support import load_beside, wait_until
from websockets.sync.client import connect

tones = load_beside(__file__, "running_server.py")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "headless_shell"))), "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER, reason="there is no Chromium: install it, and put it on the PATH"),
]
DROP = """
const file = new File([Uint8Array.from(atob("%s"), c => c.charCodeAt(0))], "a.flac");
const transfer = new DataTransfer();
transfer.items.add(file);
document.dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, bubbles: true, cancelable: true}));
"""


class Page:
    """A page of a browser, over its debugging protocol."""

    def __init__(self, folder, sound):
        words = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-port=0",
            f"--user-data-dir={folder}",
        ]
        words += ["--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]
        words += [f"--use-file-for-fake-audio-capture={sound}", "about:blank"]
        self.process = subprocess.Popen([BROWSER, *words], stderr=subprocess.PIPE, text=True)
        line = next(line for line in self.process.stderr if line.startswith("DevTools listening on "))
        address = line.split("ws://")[1].partition("/")[0]
        wait_until(lambda: self._targets(address), 60)
        self.socket = connect(self._targets(address)[0]["webSocketDebuggerUrl"], proxy=None, max_size=None)
        self.numbers = itertools.count(1)
        self.failures = []
        self.call("Runtime.enable")
        self.call("Log.enable")

    def _targets(self, address):
        return [target for target in tones.fetch(f"http://{address}/json/list")[2] if target["type"] == "page"]

    def call(self, method, **parameters):
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self.socket.recv(60))
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.failures.append(answer["params"])
            if answer.get("id") == number:
                return answer["result"]

    def run(self, script):
        return self.call("Runtime.evaluate", expression=script, awaitPromise=True)["result"].get("value")

    def shows(self, text):
        wait_until(lambda: text in (self.run("document.getElementById('text').innerText") or ""), 120)

    def end(self):
        self.socket.close()
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()


def test_dropped_files_and_speech_become_words(tmp_path):
    sound = tmp_path / "speech.wav"
    wave = np.concatenate([tones.silence(1), tones.speak("delta alpha"), tones.silence(2)])
    soundfile.write(sound, wave, tones.RATE, subtype="PCM_16")
    with tones.running(tones.tone_transcriber(tmp_path / "bundle")) as server:
        page = Page(tmp_path / "profile", sound)
        try:
            page.call("Page.navigate", url=server.url)
            wait_until(lambda: "tones" in (page.run("document.getElementById('state').innerText") or ""), 60)
            page.run(DROP % base64.b64encode(tones.flac(tones.speak("foxtrot echo"))).decode())
            page.shows("foxtrot echo")
            page.run("document.getElementById('speak').click()")
            page.shows("delta")
            page.run("document.getElementById('speak').click()")
            wait_until(lambda: server.service.admission.streams == 0)
            assert page.run("document.getElementById('error').textContent") == ""
            assert page.failures == []
        finally:
            page.end()
