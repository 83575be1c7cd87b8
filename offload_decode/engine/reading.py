"""One answer from passages of several stores: what their conversations attended to is put together as a short
text, which is run on the spot and answered from.

Unlike joined distributions it can bring together what stands in different documents, as far as it was found.
"""

from collections.abc import Iterator, Sequence

from offload_decode.engine.conversation import Conversation, Sampler
from offload_decode.engine.joint import Joint, behind_text
from offload_decode.types import CitedDocument, StepStats

DRAFT_TOKENS = 16
"""Of the joint answer during which passages are found."""
PASSAGES = 2
"""Of each document."""
DOCUMENTS = 16
"""Whose passages are read, those that gave most: with these some 4,600 tokens at most."""


class Reading(Joint):
    """Conversations behind different stores, whose passages are read together for each answer. `passages`:
    those of the last one, in the order of the documents, each with what its document gave to the joint draft;
    where none was found, `alone` is the document that gave most, which answered by itself.
    """

    def __init__(self, talks: Sequence[Conversation], way: str = "mixture", cites: bool = True):
        super().__init__(talks, way, cites=True)
        self.passages: list[CitedDocument] = []
        self.alone: int | None = None
        self._ran: list[Conversation] = []

    def tokens(
        self, question: str, weights: Sequence[float] | None, max_new_tokens: int, sampler: Sampler | None
    ) -> Iterator[int]:
        """Token ids of an answer. What was said before is said again behind the passages."""
        draft, first = self.fork(), self.talks[0]
        for _ in draft.generate(draft.ask(question, weights), DRAFT_TOKENS):
            pass
        self.passages = draft.attended()
        asked, text = self.question_tokens(question, first), text_of(self.passages)
        self.alone = None if text else draft.leading()
        if self.alone is None:
            reader: Conversation = behind_text(first, text)
            said = [*first.tokens, *first.pending, *asked]
        else:
            reader, said = self.talks[self.alone].fork(), asked
            reader.selector.reset()
        reader.check_room(len(said))
        logits, written = reader.extend(said), list[int]()
        self.asked += 1
        try:
            for token in reader.generate(logits, max_new_tokens, sampler):
                written.append(token)
                yield token
        finally:  # where it is stopped, the part that is written stays
            self.finish = reader.finish
            self.follow([*asked, *written])
            self._ran = [*draft.rows, reader]

    def citations(self) -> tuple[CitedDocument, ...]:
        """The documents whose passages were read, with these."""
        return tuple(self.passages)

    def take_stats(self) -> StepStats:
        """The costs of the last answer, since they were last taken."""
        return self.costs_of(self._ran)


def text_of(passages: Sequence[CitedDocument]) -> str:
    """The passages as the text that is read, in the order of the documents; empty where there are none."""
    least = min(sorted((one.share for one in passages), reverse=True)[:DOCUMENTS], default=0.0)
    read = [one for one in passages if one.share >= least][:DOCUMENTS]
    spans = [(one.name, span.text) for one in read for span in one.spans[:PASSAGES]]
    return "\n\n".join(f"{name}: {text}" for name, text in spans if text)
