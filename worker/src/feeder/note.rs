//! What a process was reading when a signal ended it: a note in memory that its launcher holds.
//!
//! A damaged sample can end the process that decodes it: a page that cannot be read (SIGBUS), a defect of a
//! decoder (SIGSEGV, an exhausted stack), an allocation that is refused (SIGABRT). The process cannot report
//! that; its launcher can. So every thread that reads a sample of a step writes into shared memory which one
//! it is, and a handler of such signals writes which of these threads has caught it:
//!
//! ```text
//! word 0            entry of the thread that caught the signal, counted from 1; 0: no thread that reads has
//! words 8 i ...     entry i: 1 while it is being read, then generation, epoch, position, row, begin, end
//! ```
//!
//! The launcher makes the memory, an anonymous file, and names it in `COX_READING_NOTE` by its own entry
//! below `/proc`. It reads it after the process has ended ([`killing`]), and it is gone with the launcher.
//!
//! What this does not do: look into a thread that a decoder has started itself. The decoders here run on the
//! thread that reads; what any other thread catches, such as one that trains, is held against no sample,
//! however few are being read. A SIGKILL has no handler, and says nothing of any sample.
//!
//! This is the feeder's only file with `unsafe` code.

use std::{
    cell::Cell,
    fs::File,
    io,
    os::{fd::AsRawFd, unix::fs::FileExt},
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use coxswain_proto::{ids::Generation, order::DamagedRow};
use memmap2::{MmapOptions, MmapRaw};
use nix::{
    libc,
    sys::{
        memfd::{MFdFlags, memfd_create},
        signal::{self, SaFlags, SigAction, SigHandler, SigSet, Signal},
    },
};

/// Names the memory of this process's note.
pub const VARIABLE: &str = "COX_READING_NOTE";

/// Threads that may read at the same time; samples of more are not noted.
const ENTRIES: usize = 128;
/// Words of an entry; entry 0 is the head.
const ENTRY: usize = 8;
const WORDS: usize = ENTRY * (ENTRIES + 1);
const LEN: usize = 8 * WORDS;
/// States of an entry.
const FREE: u64 = 0;
const READING: u64 = 1;
const TAKEN: u64 = 2;

/// Signals by which a sample ends a process.
const DEADLY: [Signal; 5] =
    [Signal::SIGSEGV, Signal::SIGBUS, Signal::SIGABRT, Signal::SIGILL, Signal::SIGFPE];

/// A sample that a step needs, where it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleNote {
    /// In which generation.
    pub generation: Generation,
    /// In which epoch.
    pub epoch: u64,
    /// At which position of it.
    pub position: u64,
    /// The row to leave out if it cannot be read.
    pub row: DamagedRow,
}

/// The note of this process, and the generation that it trains in.
struct Note {
    memory: MmapRaw,
    generation: AtomicU64,
}

static NOTE: OnceLock<Option<Note>> = OnceLock::new();
/// What signals did before.
static BEFORE: [OnceLock<SigAction>; DEADLY.len()] = [const { OnceLock::new() }; DEADLY.len()];

thread_local! {
    /// The entry that this thread has written; 0: none.
    static MINE: Cell<u64> = const { Cell::new(0) };
}

impl Note {
    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at < WORDS);
        // SAFETY: the mapping has WORDS aligned words and lives as long as `self`; every access to it, in
        // this process and in the launcher, is of whole words or after this process has ended.
        unsafe { AtomicU64::from_ptr(self.memory.as_mut_ptr().cast::<u64>().add(at)) }
    }
}

/// Opens the note that the launcher has made for this process, if there is one, and has deadly signals write
/// into it. Asked once; without it nothing is noted.
pub fn open() {
    NOTE.get_or_init(|| {
        let path = std::env::var(VARIABLE).ok().filter(|path| !path.is_empty())?;
        let mapped = File::options().read(true).write(true).open(&path).and_then(|file| {
            let len = file.metadata()?.len();
            match len == LEN as u64 {
                true => MmapOptions::new().len(LEN).map_raw(&file),
                false => Err(io::Error::new(io::ErrorKind::InvalidData, format!("has {len} bytes"))),
            }
        });
        match mapped {
            Ok(memory) => Some(Note { memory, generation: AtomicU64::new(0) }),
            Err(error) => {
                tracing::warn!(path, %error, "cannot use the memory that {VARIABLE} names: if a damaged sample kills this process, the launcher cannot name that sample");
                None
            }
        }
    });
    if note().is_some() {
        DEADLY.iter().zip(&BEFORE).for_each(|(signal, before)| {
            before.get_or_init(|| catch(*signal));
        });
    }
}

/// From now on samples are read for this generation.
pub fn begin(generation: Generation) {
    if let Some(note) = note() {
        note.generation.store(generation.0, Ordering::Relaxed);
    }
}

/// Notes that this thread reads a sample, until the guard is dropped. `what` is asked only where there is a
/// note.
pub(super) fn reading(epoch: u64, position: u64, row: impl FnOnce() -> DamagedRow) -> Reading {
    let nothing = Reading { entry: 0 };
    let Some(note) = note().filter(|_| MINE.get() == 0) else { return nothing };
    let free = |entry: &usize| {
        let state = note.word(ENTRY * entry);
        state.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
    };
    let Some(entry) = (1..=ENTRIES).find(free) else { return nothing };
    let (DamagedRow { row, begin, end }, at) = (row(), ENTRY * entry);
    let generation = note.generation.load(Ordering::Relaxed);
    for (word, value) in (at + 1..).zip([generation, epoch, position, row, begin, end]) {
        note.word(word).store(value, Ordering::Relaxed);
    }
    note.word(at).store(READING, Ordering::Release);
    MINE.set(entry as u64);
    Reading { entry }
}

/// While it is there, its thread reads a sample.
pub(super) struct Reading {
    entry: usize,
}

impl Drop for Reading {
    fn drop(&mut self) {
        if let Some(note) = note().filter(|_| self.entry > 0) {
            MINE.set(0);
            note.word(ENTRY * self.entry).store(FREE, Ordering::Release);
        }
    }
}

fn note() -> Option<&'static Note> {
    NOTE.get()?.as_ref()
}

/// Has a signal write into the note before it does what it did.
fn catch(signal: Signal) -> SigAction {
    let flags = SaFlags::SA_SIGINFO | SaFlags::SA_ONSTACK;
    let ours = SigAction::new(SigHandler::SigAction(caught), flags, SigSet::empty());
    // SAFETY: the handler makes async-signal-safe calls only: it reads and writes atomics and a thread-local
    // cell without a destructor, which is there for every thread of an executable, and calls sigaction and
    // raise. It runs on the stack that std makes for the signals of every thread.
    let before = unsafe { signal::sigaction(signal, &ours) };
    before.unwrap_or_else(|_| SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty()))
}

extern "C" fn caught(number: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    if let Some(note) = note() {
        // The first signal counts: what it set off may end in another one.
        let _ = note.word(0).compare_exchange(0, MINE.get(), Ordering::Relaxed, Ordering::Relaxed);
    }
    let Some(place) = DEADLY.iter().position(|signal| *signal as libc::c_int == number) else { return };
    let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
    let before = BEFORE[place].get().copied().unwrap_or(default);
    // SAFETY: puts back what was there before, which its owner has installed as a handler of this signal.
    let _ = unsafe { signal::sigaction(DEADLY[place], &before) };
    // SAFETY: the kernel hands a handler with SA_SIGINFO a valid pointer.
    let sent = unsafe { (*info).si_code } <= 0;
    // A fault comes again when its instruction does, and `abort` raises its signal again; what was sent by a
    // process does not.
    if sent && number != libc::SIGABRT {
        let _ = signal::raise(DEADLY[place]);
    }
}

/// Memory for the note of a process that is about to be started, and the value of [`VARIABLE`] for it.
pub fn make() -> io::Result<(File, String)> {
    let file = File::from(memfd_create("coxswain-reading", MFdFlags::MFD_CLOEXEC)?);
    file.set_len(LEN as u64)?;
    let place = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    Ok((file, place))
}

/// The sample that the thread was reading which caught the signal that ended its process; nothing if none has
/// caught it, or one that reads no sample.
pub fn killing(note: &File) -> Option<SampleNote> {
    let mut bytes = vec![0; LEN];
    note.read_exact_at(&mut bytes, 0).ok()?;
    let words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let entry = |entry: usize| words.get(ENTRY * entry..ENTRY * (entry + 1));
    let number = usize::try_from(words[0]).ok().filter(|number| (1..=ENTRIES).contains(number))?;
    let [READING, generation, epoch, position, row, begin, end, _] = *entry(number)? else { return None };
    let row = DamagedRow { row, begin, end };
    Some(SampleNote { generation: Generation(generation), epoch, position, row })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A note with these words.
    fn written(words: &[(usize, u64)]) -> File {
        let (file, _) = make().expect("memory");
        for (at, value) in words {
            file.write_all_at(&value.to_le_bytes(), 8 * *at as u64).expect("there is room");
        }
        file
    }

    fn entry(number: usize, state: u64, position: u64) -> Vec<(usize, u64)> {
        (ENTRY * number..).zip([state, 3, 1, position, 40, 25, 41]).collect()
    }

    fn noted(position: u64) -> Option<SampleNote> {
        let row = DamagedRow { row: 40, begin: 25, end: 41 };
        Some(SampleNote { generation: Generation(3), epoch: 1, position, row })
    }

    #[test]
    fn the_thread_that_caught_the_signal_names_the_sample() {
        let both = [entry(1, READING, 7), entry(2, READING, 8)].concat();
        assert_eq!(killing(&written(&[both, vec![(0, 2)]].concat())), noted(8));
        assert_eq!(killing(&written(&[entry(1, TAKEN, 7), vec![(0, 1)]].concat())), None);
        assert_eq!(killing(&written(&[(0, 9)])), None, "it was not reading any more");
        assert_eq!(killing(&written(&[(0, u64::MAX)])), None);
    }

    #[test]
    fn the_only_sample_is_not_blamed_for_what_no_thread_that_reads_has_caught() {
        assert_eq!(killing(&written(&entry(2, READING, 8))), None, "SIGKILL, or a thread that trains");
    }
}
