"""PowerPoint presentations, by lxml.

Reads: the slides in their order, each with its notes; tables, with tabs between cells; diagrams. Leaves out:
hidden slides, images, charts and comments, with a note that counts them; the numbers of slides. Costs: about
ten times the unpacked text in memory.
"""

from __future__ import annotations

from offload_decode.prefill_jobs.documents.archives import Archive
from offload_decode.prefill_jobs.documents.base import Reading, left_out
from offload_decode.prefill_jobs.documents.office import Text, attribute, named


def read(archive: Archive, main: str) -> Reading:
    """The text of the presentation whose `main` part this is. Raises as `Archive`."""
    links, text = archive.links(main), Text(archive)
    listed = [one for one in archive.xml(main).iter() if named(one) == ":sldId"]
    found = [links.get(attribute(one, "id", of="relationships")) for one in listed]
    for part in dict.fromkeys(link.part for link in found if link):
        if archive.xml(part).get("show") in ("0", "false"):
            text.counts["hidden slide"] += 1
            continue
        text.read(part)
        beside = archive.links(part).values()
        text.counts["comment"] += sum(
            named(one) == ":cm"
            for link in beside
            if link.kind == "comments"
            for one in archive.xml(link.part)
        )
        for link in beside:
            if link.kind == "notesSlide":
                text.read(link.part)
        text.lines.end_line(blank=True)
    return Reading(text.lines.text, left_out(text.counts))
