"""A model repository on the Hub as a place that a conversion goes to, whole or not at all.

Shards go to a *work branch*, named after the plan, as they become durable; one commit then brings
them to the target revision, in which the Hub copies them from the branch without moving a byte.

Why a branch: `preupload_lfs_files` and a single `create_commit` would be atomic too, but what was
sent before a kill is lost to the next process, since the library has no public way to commit a
file that this process did not send. A branch is one, lists what is there with its SHA-256, and is
shared by machines that have nothing else in common. It costs a commit for a few shards; the Hub
allows 128 an hour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    ModelInfo,
    get_token,
    hf_hub_url,
)
from huggingface_hub.errors import (
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from moeconv.errors import MoeconvError, OutputError
from moeconv.output.hubcalls import ask, be_patient
from moeconv.output.tree import Held

Operation: TypeAlias = "CommitOperationAdd | CommitOperationCopy | CommitOperationDelete"

_BRANCH_DIGITS: Final = 16


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a conversion is published.

    Attributes
    ----------
    name
        The repository, `org/name`.
    revision
        The branch on which the model appears.
    private
        Make the repository private; one that is there must be.
    create_pr
        Let the model appear in a pull request instead.
    """

    name: str
    revision: str = "main"
    private: bool = False
    create_pr: bool = False


class Repository:
    """A model repository that the token may write to.

    Every method asks again where that helps, and raises `OutputError` where it does not.

    Parameters
    ----------
    destination
        Which one, and which revision.
    plan_id
        The plan that is published; names the work branch.
    kind
        What it is that the Hub refuses: of what is written, or of what is only read.
    """

    def __init__(
        self, destination: Destination, plan_id: str, kind: type[MoeconvError] = OutputError
    ) -> None:
        self.destination, self._kind = destination, kind
        self.name = destination.name
        self.work = f"moeconv-{plan_id[:_BRANCH_DIGITS]}"
        self._api = HfApi()
        be_patient()

    def open(self) -> None:
        """Make the repository and the work branch where they are missing.

        Raises
        ------
        OutputError
            There is no token, it may not write there, or a public repository was to be private.
        """
        where, wanted = f"`{self.name}`", self.destination
        ask(f"publish to {where}", _need_token)
        ask(
            f"make {where}",
            lambda: self._api.create_repo(
                self.name, private=True if wanted.private else None, exist_ok=True
            ),
        )
        self._check_private(ask(f"look at {where}", lambda: self._api.model_info(self.name)))
        ask(
            f"write to {where}",
            lambda: self._api.create_branch(self.name, branch=self.work, exist_ok=True),
        )

    def check(self) -> bool:
        """Say whether the repository is there, and change nothing.

        Raises
        ------
        OutputError
            It is there, and `open` would be refused.
        """
        where = f"`{self.name}`"
        ask(f"publish to {where}", _need_token)

        def look() -> ModelInfo | None:
            try:
                return self._api.model_info(self.name)
            except RepositoryNotFoundError:
                return None

        info = ask(f"look at {where}", look)
        if info is None:
            return False
        self._check_private(info)
        ask(f"write to {where}", lambda: self._api.auth_check(self.name, write=True))
        return True

    def _check_private(self, info: ModelInfo) -> None:
        if self.destination.private and not info.private:
            message = f"`{self.name}` is public, but `--private` was given"
            raise OutputError(message, hint="make it private on the Hub, or leave the flag out")

    def head(self, revision: str) -> str | None:
        """Return the commit that a revision is at; none if it, or the repository, is not there."""

        def look() -> str | None:
            try:
                return self._api.model_info(self.name, revision=revision).sha
            except (RepositoryNotFoundError, RevisionNotFoundError):
                return None

        return ask(f"look at `{self.name}`", look, self._kind)

    def files(self, revision: str | None) -> dict[str, Held]:
        """Return the tree of a revision by path; an empty one where there is none."""
        if revision is None:
            return {}

        def look() -> dict[str, Held]:
            tree = self._api.list_repo_tree(self.name, recursive=True, revision=revision)
            try:
                return {
                    file.path: Held(file.size, file.lfs.sha256 if file.lfs else None, file.blob_id)
                    for file in tree
                    if isinstance(file, RepoFile)
                }
            except (RepositoryNotFoundError, RevisionNotFoundError):
                return {}

        return ask(f"list `{self.name}`", look, self._kind)

    def read(self, path: str, revision: str) -> bytes:
        """Return a small file."""

        def get() -> bytes:
            url = hf_hub_url(self.name, path, revision=revision)
            response = get_session().get(url, headers=build_hf_headers())
            hf_raise_for_status(response)
            return bytes(response.content)

        return ask(f"read `{path}` of `{self.name}`", get, self._kind)

    def send(self, path: str, file: Path, sha256: str) -> CommitOperationAdd:
        """Send a large file ahead of its commit; the digest is known, so it is read once.

        Returns
        -------
        CommitOperationAdd
            What commits it.
        """

        def upload() -> CommitOperationAdd:
            # Made anew each time: one that failed half way may keep what is no longer true.
            operation = CommitOperationAdd(path, file)
            operation.upload_info.sha256 = bytes.fromhex(sha256)
            self._api.preupload_lfs_files(self.name, [operation], revision=self.work)
            return operation

        return ask(f"send `{path}` to `{self.name}`", upload)

    def keep(self, operations: Sequence[Operation], message: str) -> str:
        """Commit to the work branch, which machines may share, and return the commit.

        Repeating it is safe: the library leaves out what is there already.
        """

        def commit() -> str:
            return self._api.create_commit(
                self.name, operations, commit_message=message, revision=self.work
            ).oid

        return ask(f"commit to `{self.name}`", commit)

    def publish(
        self, operations: Callable[[], Sequence[Operation]], message: str, parent: str
    ) -> str:
        """Commit to the target revision, if it is still at `parent`; return what has it then.

        The operations are worked out anew for each try, from what is there: if an earlier one
        came through and only its answer was lost, nothing is left to do, and nothing is done.
        """
        wanted = self.destination

        def commit() -> str:
            done = self._api.create_commit(
                self.name,
                operations(),
                commit_message=message,
                revision=wanted.revision,
                parent_commit=parent,
                create_pr=wanted.create_pr,
            )
            return done.pr_revision or done.oid

        return ask(f"publish to `{self.name}`", commit)

    def check_work(self, lacking: Callable[[Mapping[str, Held]], Sequence[str]]) -> None:
        """Refuse to go on where the work branch has not what was committed to it.

        Raises
        ------
        OutputError
            A `.gitignore` in the repository drops a file, which the client says to no one.
        """
        names = lacking(self.files(self.work))
        if names:
            message = f"`{names[0]}` was sent to `{self.name}`, but is not there"
            hint = "does the `.gitignore` of the repository name it? take that out"
            raise OutputError(message, hint=hint)

    def target(self) -> str:
        """Return the commit that the target revision is at; its branch is made if missing."""
        branch = self.destination.revision
        head = self.head(branch)
        if head is None:
            ask(
                f"make the branch `{branch}` of `{self.name}`",
                lambda: self._api.create_branch(self.name, branch=branch, exist_ok=True),
            )
            head = self.head(branch)
        if head is None:
            message = f"`{self.name}` has no revision `{branch}`"
            raise OutputError(message, hint="give the name of a branch")
        return head

    def drop_work(self) -> None:
        """Remove the work branch; it is no loss if it is gone."""

        def drop() -> None:
            try:
                self._api.delete_branch(self.name, branch=self.work)
            except RevisionNotFoundError:
                return

        ask(f"remove the branch `{self.work}` of `{self.name}`", drop)


def addition(path: str, content: bytes | Path) -> CommitOperationAdd:
    """Return what adds or replaces a file."""
    return CommitOperationAdd(path, content)


def copy(path: str, revision: str) -> CommitOperationCopy:
    """Return what takes over a file from another revision, as it is."""
    return CommitOperationCopy(path, path, src_revision=revision)


def removal(path: str) -> CommitOperationDelete:
    """Return what removes a file."""
    return CommitOperationDelete(path)


def _need_token() -> None:
    if get_token() is None:
        raise LocalTokenNotFoundError
