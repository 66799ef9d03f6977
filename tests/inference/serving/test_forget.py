"""Users let a server forget their own texts, and nobody else's."""

import httpx2
from helpers.raw_http import wait_until
from helpers.serving import MODEL, Running, running, tiny_decoder

from inference.serving.adaptation import Learner


def test_a_server_that_keeps_nothing_has_nothing_to_forget(server: Running) -> None:
    found = httpx2.delete(f"{server.url}/adaptation")
    assert found.status_code == 404
    assert "no text is kept" in found.json()["error"]["message"]


def test_a_user_forgets_the_own_texts_only() -> None:
    learner = Learner(("false",), "drafter")
    keys = ("first-secret", "second-secret")
    with running(tiny_decoder(trained=True), learner, adapt="shared", api_keys=keys) as served:
        adaptation = served.server.service.adaptation
        assert adaptation is not None
        for number, key in enumerate(keys, 1):
            with served.client(key) as client:
                for first in range(2 * number):
                    client.completions.create(model=MODEL, prompt=[first, 7], max_tokens=3)
        wait_until(lambda: len(adaptation._ring) == 6)
        url = f"{served.url}/adaptation"
        assert httpx2.delete(url).status_code == 401
        assert len(adaptation._ring) == 6
        found = httpx2.delete(url, headers={"Authorization": "Bearer second-secret"})
        assert found.json() == {
            "object": "adaptation.deleted",
            "deleted": True,
            "texts": 4,
            "versions": 0,
        }
        assert len(adaptation._ring) == 2
        assert adaptation._ring.traffic(9, 9).tenants == ("key 1",)
