"""Prompts are shown with their answers, and equal answers are shown once."""

from helpers.comparisons import make_document, with_figures

from inference.benchmark.report.exchanges import MOST_SHOWN, SharedAnswer, exchanges_of


def test_methods_with_the_same_answer_share_it() -> None:
    document = make_document(("autoregressive", "drafter=a", "drafter=b"), (0.0, 1.0), prompts=2)
    first, *others = document.methods[2].samples
    other = first.model_copy(update={"answer": "Another one."})
    document = with_figures(document, 2, samples=(other, *others))
    exchange, _ = exchanges_of(document)
    assert exchange.question == "Question 0?"
    assert exchange.answers == [
        SharedAnswer(0.0, ["autoregressive", "drafter=a"], "Answer 0."),
        SharedAnswer(0.0, ["drafter=b"], "Another one."),
        SharedAnswer(1.0, ["autoregressive", "drafter=a", "drafter=b"], "Answer 0."),
    ]


def test_a_page_shows_few_prompts_and_short_titles() -> None:
    document = make_document(prompts=MOST_SHOWN + 5)
    long = dict.fromkeys(document.questions, "word\n" * 100)
    exchanges = exchanges_of(document.model_copy(update={"questions": long}))
    assert len(exchanges) == MOST_SHOWN
    assert all(len(exchange.title) == 90 and "\n" not in exchange.title for exchange in exchanges)


def test_a_document_without_texts_has_no_exchanges() -> None:
    assert exchanges_of(make_document().model_copy(update={"questions": {}})) == []
