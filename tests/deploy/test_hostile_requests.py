"""Every form of the corpus of hostile requests, sent once; afterwards the service answers a valid request as before."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator

import devices
import pytest
import request_corpus
from request_corpus import GOOD, Form, complaint, sent
from serving import FACTS, Service, eventually, serving

from deploy.contract import bundle
from deploy.runner.model import Model


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    opened = bundle.Bundle(devices.packed(samples=0))
    facts = {**FACTS, "answers": opened.answers}
    with Model(opened, "int8") as model, serving(model, facts, timeout_s=2.0, idle_s=3.0) as running:
        yield running


def test_the_corpus_is_large() -> None:
    assert len(request_corpus.forms()) >= 300


@pytest.mark.parametrize("family", request_corpus.FAMILIES)
def test_every_form_has_an_allowed_outcome(family: Callable[[], Iterator[Form]], service: Service) -> None:
    before = service.ask("POST", "/v1/predict", GOOD)[2]["top"]
    forms = list(family())
    address = ("127.0.0.1", service.port)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda form: sent(address, form), forms))
    complaints = {
        form.name: problem
        for form, outcome in zip(forms, outcomes, strict=True)
        if (problem := complaint(form, outcome))
    }
    assert not complaints
    assert service.ask("POST", "/v1/predict", GOOD)[2]["top"] == before
    assert service.metric("coralline_unexpected_errors_total") == 0
    assert service.metric("coralline_held_bytes") == 0
    eventually(lambda: service.metric("coralline_connections") == 1)
