"""A hook of MkDocs: the site has every page at its path in the repository, so that links lead to the same."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

SHOWN = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "docs/*.md",
    "docs/site/*.css",
    "docs/site/*.png",
    "offload_decode/server/http/page/icon.svg",
    "benchmarks/README.md",
    "benchmarks/results/*",
    "offload_decode/demo_models/*/README.md",
    "prefill_jobs/cloud/*",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """In place of `docs/`, what is `SHOWN` of the whole tree, by its path from the root."""
    root = Path(config.config_file_path).parent
    for file in [own for own in files if own.src_dir == config.docs_dir]:
        files.remove(file)
    for pattern in SHOWN:
        for path in sorted(root.glob(pattern)):
            own = path.relative_to(root).as_posix()
            files.append(File(own, str(root), config.site_dir, config.use_directory_urls))
    return files
