//! Read-only memory maps of weight files: the one place of the model code that needs `unsafe`.
//!
//! A mapped file costs no memory until it is read, its pages are shared by all workers of a node, and the
//! kernel may drop them again. The price is the one every user of `mmap` pays (PyTorch and Transformers among
//! them): a file that is cut short while a worker reads it through the map ends that worker with `SIGBUS`.
//! What is streamed while training runs is read by plain calls (`reading`), whose faults are errors.

use std::{fs::File, io, ops::Range};

use memmap2::{Mmap, UncheckedAdvice};

/// Maps a whole file for reading.
pub fn map(file: &File) -> io::Result<Mmap> {
    // SAFETY: the map is read-only and private to us; we hand out only shared slices of it. Weight files are
    // not modified in place while a run uses them (tools publish them by rename), which is the remaining
    // requirement of `Mmap::map`.
    unsafe { Mmap::map(file) }
}

/// Takes what was read of a map out of this process's memory; the kernel may keep it for another reader.
pub fn release(map: &Mmap, part: Range<usize>) {
    // SAFETY: the map is of a file, shared and never written to: what is read again comes from the file.
    let released = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, part.start, part.len()) };
    // Where that is not possible it stays until the kernel wants the memory.
    let _ = released;
}
