"""StagingMemory: the memory of one pair of workers, a memfd that both map.

It has no name in any file system: the kernel frees it with the last process that maps it, however that
process ended, and nobody has anything to unlink. It is sealed against shrinking, since reading behind the end
of a file kills the reader. The first page holds what both sides write to prove that they see the same memory;
the slots lie behind it. Usable from any thread.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets

NONCE_BYTES = 16

_MFD_NOEXEC_SEAL = 0x8  # linux/memfd.h; hosts may insist on it, kernels before 6.3 do not know it
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create_memory(num_bytes: int) -> int:
    """A descriptor of new, sealed memory with room for `num_bytes` of slots, decode's nonce already in it.

    Pages are taken when they are first written. Raises OSError where the system has or allows no such memory.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create("baton-staging", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.memfd_create("baton-staging", flags)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE + num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        os.pwrite(descriptor, secrets.token_bytes(NONCE_BYTES), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class StagingMemory:
    """A mapping of it: read-only at decode, writable at prefill."""

    def __init__(self, descriptor: int, num_bytes: int, *, is_writable: bool) -> None:
        """`descriptor` stays the caller's. Raises OSError if it is not memory of that size, sealed."""
        size = mmap.PAGESIZE + num_bytes
        if os.fstat(descriptor).st_size != size:
            raise OSError(errno.EINVAL, "the staging memory does not have the size that was agreed")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError(errno.EPERM, "the staging memory is not sealed")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        # unmapped with the last view of it
        with memoryview(mmap.mmap(descriptor, size, mmap.MAP_SHARED, protection)) as whole:
            self._proofs = whole[: mmap.PAGESIZE]
            self.slots = whole[mmap.PAGESIZE :]

    @property
    def decode_nonce(self) -> bytes:
        """What decode wrote before it passed the memory on."""
        return bytes(self._proofs[:NONCE_BYTES])

    @property
    def prefill_nonce(self) -> bytes:
        """What prefill wrote when it had mapped it."""
        return bytes(self._proofs[NONCE_BYTES : 2 * NONCE_BYTES])

    def write_prefill_nonce(self, nonce: bytes) -> None:
        assert len(nonce) == NONCE_BYTES
        self._proofs[NONCE_BYTES : 2 * NONCE_BYTES] = nonce

    def close(self) -> None:
        """Unmap it; if a part of it is still referred to, by a copy that is under way for example, when the
        last such reference goes.
        """
        self._proofs.release()
        self.slots.release()
