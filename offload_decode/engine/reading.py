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


class Reading(Joint):
    """Conversations behind different stores, whose passages are read together for each answer; `passages`:
    those of the last one, in the order of the documents.
    """

    def __init__(self, talks: Sequence[Conversation], way: str = "mixture", cites: bool = True):
        super().__init__(talks, way, cites=True)
        self.passages: list[CitedDocument] = []
        self._stats = StepStats()

    def tokens(
        self, question: str, weights: Sequence[float] | None, max_new_tokens: int, sampler: Sampler | None
    ) -> Iterator[int]:
        """Token ids of an answer. What was said before is said again behind the passages."""
        draft, first = self.fork(), self.talks[0]
        for _ in draft.generate(draft.ask(question, weights), DRAFT_TOKENS):
            pass
        self.passages = draft.attended()
        text = "\n\n".join(
            f"{document.name}: {span.text}"
            for document in self.passages
            for span in document.spans[:PASSAGES]
        )
        reader, asked = behind_text(first, text), self.question_tokens(question, first)
        said = [*first.tokens, *first.pending, *asked]
        reader.check_room(len(said))
        logits, written = reader.extend(said), list[int]()
        try:
            for token in reader.generate(logits, max_new_tokens, sampler):
                written.append(token)
                yield token
        finally:  # where it is stopped, the part that is written stays
            self.finish = reader.finish
            self.follow([*asked, *written])
            for cost in (draft.take_stats(), reader.prefix.take_stats()):
                self._stats.add(cost)

    def citations(self) -> tuple[CitedDocument, ...]:
        """The documents whose passages were read, with these."""
        return tuple(self.passages)

    def take_stats(self) -> StepStats:
        """The costs since they were last taken."""
        stats = super().take_stats()
        stats.add(self._stats)
        self._stats = StepStats()
        return stats
