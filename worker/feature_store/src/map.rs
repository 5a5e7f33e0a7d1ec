//! Read-only memory maps of published shards: the one place of the store that needs `unsafe`.
//!
//! A mapped shard costs no memory of ours: its pages are the kernel's, shared by all ranks of a node, and may
//! be dropped again.

use std::{fs::File, io, path::Path};

use memmap2::{Advice, Mmap};

/// Maps a published shard.
pub(super) fn map(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: `Mmap::map` requires that the file is not changed while it is mapped. A shard gets its name by
    // rename after its last byte is on disk, and nothing in this program opens a file of that name for
    // writing again: it is only ever unlinked, or another file is renamed over it (a repair), both of which
    // leave mapped pages as they are. The map is read-only, and only shared slices of it are handed out. Bits
    // that rot on the device between two reads change bytes, not types: every value is decoded from bytes,
    // for which all patterns are valid, lengths are checked at every access, and the checksum is computed
    // before anything is used. A page that cannot be read any more (the file is truncated from outside,
    // the device fails, another host of a network file system takes the file away) ends the process with
    // SIGBUS, as with the weight files; no wrong value is read.
    unsafe { Mmap::map(&file) }
}

/// Asks the kernel to begin reading a range, so that a record that is not in memory does not come in page by
/// page.
pub(super) fn prefetch(map: &Mmap, offset: usize, len: usize) {
    // Advice may be refused (a file system without read-ahead); the read then takes longer and is otherwise
    // the same.
    let _ = map.advise_range(Advice::WillNeed, offset, len);
}
