//! A stream of bytes from one process to another of the same machine, through memory that both have mapped.
//!
//! ```text
//! 0        64        128      192             256             4096
//! nonce    written   read     reader waits    writer waits    bytes: position p of the stream is at p mod
//!                                                             CAPACITY
//! ```
//!
//! One process writes, one reads, and each counter has one writer. A rank that finds nothing to do sets its
//! flag, looks once more, and sleeps on the connection that the two have anyway; the other clears the flag
//! and sends a byte there. Nothing is ever waited for in here.
//!
//! The memory is an anonymous file that cannot shrink. It needs no name: the reader opens it through the
//! writer's `/proc` entry, which fails where it should (another machine, another container, another user),
//! and it is gone with its two processes, however they end.
//!
//! This file is the ring's only boundary to shared memory.

use std::{
    fs::{self, File},
    hash::{BuildHasher, RandomState},
    io::{self, ErrorKind},
    os::fd::AsRawFd,
    sync::atomic::{AtomicU32, AtomicU64, Ordering, fence},
};

use memmap2::{MmapOptions, MmapRaw};
use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::memfd::{MFdFlags, memfd_create},
};

/// Bytes in flight at most: they stay in the L2 cache of the cores that move them.
pub(super) const CAPACITY: usize = 256 << 10;

/// What the file is called, and what its entry below `/proc` points to.
const NAME: &str = "coxswain-ring";
const LINK: &str = "/memfd:coxswain-ring (deleted)";

const NONCE: usize = 0;
const WRITTEN: usize = 64;
const READ: usize = 128;
const READER_WAITS: usize = 192;
const WRITER_WAITS: usize = 256;
const BYTES: usize = 4096;
const LEN: usize = BYTES + CAPACITY;

/// Where the reader finds a writer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemoryPlace {
    /// The writer's process.
    pub pid: u32,
    /// Number for the file.
    pub fd: u32,
    /// What stands at the beginning, so that a number that means another file there is noticed.
    pub nonce: u64,
}

/// The writing end.
#[derive(Debug)]
pub(super) struct Writer {
    memory: Memory,
    written: u64,
}

/// The reading end.
#[derive(Debug)]
pub(super) struct Reader {
    memory: Memory,
    read: u64,
}

/// A writing end without a reader yet. The file must stay open until the reader has opened it.
#[derive(Debug)]
pub(super) struct MemoryOffer {
    file: File,
    writer: Writer,
    place: MemoryPlace,
}

impl MemoryOffer {
    /// New memory.
    pub fn new() -> io::Result<Self> {
        let file = File::from(memfd_create(NAME, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?);
        file.set_len(LEN as u64)?;
        fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW))?;
        let memory = Memory::map(&file)?;
        let nonce = RandomState::new().hash_one(std::process::id()) | 1;
        memory.u64(NONCE).store(nonce, Ordering::Release);
        let place = MemoryPlace { pid: std::process::id(), fd: file.as_raw_fd() as u32, nonce };
        Ok(Self { file, writer: Writer { memory, written: 0 }, place })
    }

    /// Where to find it.
    pub fn place(&self) -> MemoryPlace {
        self.place
    }

    /// It has been opened by a reader.
    pub fn taken(self) -> Writer {
        drop(self.file);
        self.writer
    }
}

impl Writer {
    /// Writes what there is room for; 0 if there is none.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let read = self.memory.u64(READ).load(Ordering::Acquire);
        let count = bytes.len().min(CAPACITY - in_flight(self.written, read)?);
        self.memory.put(self.written, &bytes[..count]);
        self.written += count as u64;
        self.memory.u64(WRITTEN).store(self.written, Ordering::Release);
        Ok(count)
    }

    /// Whether the reader sleeps and must be woken; asked after a write.
    pub fn must_wake(&self) -> bool {
        self.memory.take_flag(READER_WAITS)
    }

    /// Says that this end is about to sleep. False if there is room after all.
    pub fn may_sleep(&self) -> io::Result<bool> {
        self.memory.raise_flag(WRITER_WAITS);
        let read = self.memory.u64(READ).load(Ordering::Acquire);
        Ok(in_flight(self.written, read)? == CAPACITY)
    }
}

impl Reader {
    /// Opens the memory of another process of this machine.
    pub fn open(place: &MemoryPlace) -> io::Result<Self> {
        // The place is another process's word. Opening a device or a pipe can do something, so that only what
        // is called as the memory of a ring is opened at all.
        let path = format!("/proc/{}/fd/{}", place.pid, place.fd);
        if fs::read_link(&path)?.as_os_str() != LINK {
            return Err(io::Error::new(ErrorKind::InvalidData, "not the memory of a ring"));
        }
        let file = File::options().read(true).write(true).open(path)?;
        let seals = fcntl(&file, FcntlArg::F_GET_SEALS)?;
        let sealed = seals & SealFlag::F_SEAL_SHRINK.bits() != 0;
        if !sealed || file.metadata()?.len() != LEN as u64 {
            return Err(io::Error::new(ErrorKind::InvalidData, "not the memory of a ring"));
        }
        let memory = Memory::map(&file)?;
        if memory.u64(NONCE).load(Ordering::Acquire) != place.nonce {
            return Err(io::Error::new(ErrorKind::InvalidData, "the memory of another ring"));
        }
        Ok(Self { memory, read: 0 })
    }

    /// Copies what is there without taking it; 0 if nothing is.
    pub fn peek(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let written = self.memory.u64(WRITTEN).load(Ordering::Acquire);
        let count = bytes.len().min(in_flight(written, self.read)?);
        self.memory.get(self.read, &mut bytes[..count]);
        Ok(count)
    }

    /// Reads what is there; 0 if nothing is.
    pub fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.peek(bytes)?;
        self.read += count as u64;
        self.memory.u64(READ).store(self.read, Ordering::Release);
        Ok(count)
    }

    /// Whether the writer sleeps and must be woken; asked after a read.
    pub fn must_wake(&self) -> bool {
        self.memory.take_flag(WRITER_WAITS)
    }

    /// Says that this end is about to sleep. False if there is something to read after all.
    pub fn may_sleep(&self) -> io::Result<bool> {
        self.memory.raise_flag(READER_WAITS);
        let written = self.memory.u64(WRITTEN).load(Ordering::Acquire);
        Ok(in_flight(written, self.read)? == 0)
    }
}

/// Bytes between two counters; an error if the other process has left the protocol.
fn in_flight(written: u64, read: u64) -> io::Result<usize> {
    let count = written.wrapping_sub(read);
    if count > CAPACITY as u64 {
        let what = format!("impossible counters: {written} bytes written, {read} read");
        return Err(io::Error::new(ErrorKind::InvalidData, what));
    }
    Ok(count as usize)
}

/// The mapped file.
#[derive(Debug)]
struct Memory(MmapRaw);

impl Memory {
    fn map(file: &File) -> io::Result<Self> {
        MmapOptions::new().len(LEN).map_raw(file).map(Self)
    }

    fn u64(&self, at: usize) -> &AtomicU64 {
        debug_assert!(at + 8 <= BYTES && at.is_multiple_of(8));
        // SAFETY: `at` is one of the constants above: inside the mapping, which lives as long as `self`,
        // aligned because mappings begin at a page, and touched only as an atomic, by both processes.
        unsafe { AtomicU64::from_ptr(self.0.as_mut_ptr().add(at).cast()) }
    }

    fn u32(&self, at: usize) -> &AtomicU32 {
        debug_assert!(at + 4 <= BYTES && at.is_multiple_of(4));
        // SAFETY: as in `u64`.
        unsafe { AtomicU32::from_ptr(self.0.as_mut_ptr().add(at).cast()) }
    }

    /// Copies into the part of the stream from `position` on. The caller has made sure that it is free.
    fn put(&self, position: u64, bytes: &[u8]) {
        let at = (position % CAPACITY as u64) as usize;
        let (first, rest) = bytes.split_at(bytes.len().min(CAPACITY - at));
        // SAFETY: both parts lie inside the mapping: `at < CAPACITY`, and callers give at most CAPACITY
        // bytes. They are free, so only the one writer touches them until its counter is raised, which
        // publishes them (release) to a reader that looks at it (acquire). The file cannot shrink below the
        // mapping: it is sealed, and the reader checks that.
        unsafe {
            let base = self.0.as_mut_ptr().add(BYTES);
            std::ptr::copy_nonoverlapping(first.as_ptr(), base.add(at), first.len());
            std::ptr::copy_nonoverlapping(rest.as_ptr(), base, rest.len());
        }
    }

    /// Copies out of the part of the stream from `position` on. The caller has made sure that it is written.
    fn get(&self, position: u64, bytes: &mut [u8]) {
        let at = (position % CAPACITY as u64) as usize;
        let length = bytes.len();
        let (first, rest) = bytes.split_at_mut(length.min(CAPACITY - at));
        // SAFETY: as in `put`, the other way round: what is written and not yet read belongs to the one
        // reader until it raises its counter.
        unsafe {
            let base = self.0.as_mut_ptr().add(BYTES);
            std::ptr::copy_nonoverlapping(base.add(at), first.as_mut_ptr(), first.len());
            std::ptr::copy_nonoverlapping(base, rest.as_mut_ptr(), rest.len());
        }
    }

    /// Before the look that decides about sleeping. With the fence in [`take_flag`](Self::take_flag) at least
    /// one of the two sees the other: the sleeper the new counter, or the waker the flag.
    fn raise_flag(&self, flag: usize) {
        self.u32(flag).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// After a counter was raised.
    fn take_flag(&self, flag: usize) -> bool {
        fence(Ordering::SeqCst);
        self.u32(flag).load(Ordering::Relaxed) != 0 && self.u32(flag).swap(0, Ordering::Relaxed) != 0
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn pair() -> (Writer, Reader) {
        let offer = MemoryOffer::new().expect("memory");
        let reader = Reader::open(&offer.place()).expect("it is ours");
        (offer.taken(), reader)
    }

    #[test]
    fn a_stream_longer_than_the_memory_arrives_whole_and_in_order() {
        let (mut writer, mut reader) = pair();
        let total = 5 * CAPACITY + 12_345;
        let byte = |at: usize| (at * 31 + at / 251) as u8;
        thread::scope(|scope| {
            scope.spawn(move || {
                let all: Vec<u8> = (0..total).map(byte).collect();
                let mut sent = 0;
                while sent < total {
                    let end = total.min(sent + 70_001);
                    sent += writer.write(&all[sent..end]).expect("the reader keeps to the protocol");
                }
            });
            let (mut seen, mut piece) = (0, vec![0; 50_003]);
            while seen < total {
                let count = reader.read(&mut piece).expect("the writer keeps to the protocol");
                assert!(piece[..count].iter().enumerate().all(|(at, value)| *value == byte(seen + at)));
                seen += count;
            }
        });
    }

    #[test]
    fn who_is_about_to_sleep_is_woken_once() {
        let (mut writer, mut reader) = pair();
        assert!(reader.may_sleep().expect("sound"));
        writer.write(b"x").expect("sound");
        assert!(writer.must_wake() && !writer.must_wake());
        assert!(!reader.may_sleep().expect("sound"), "there is a byte");
        assert!(!writer.may_sleep().expect("sound"), "there is room");
        while writer.write(&[0; 4096]).expect("sound") > 0 {}
        assert!(writer.may_sleep().expect("sound"));
        reader.read(&mut [0; 16]).expect("sound");
        assert!(reader.must_wake());
    }

    #[test]
    fn what_is_not_the_memory_of_this_ring_is_refused() {
        let offer = MemoryOffer::new().expect("memory");
        let place = offer.place();
        assert!(Reader::open(&MemoryPlace { nonce: place.nonce ^ 2, ..place }).is_err());
        assert!(Reader::open(&MemoryPlace { fd: 0, ..place }).is_err());
        assert!(Reader::open(&MemoryPlace { pid: u32::MAX, ..place }).is_err());
        let plain = tempfile::tempfile().expect("a file");
        plain.set_len(LEN as u64).expect("a length");
        assert!(
            Reader::open(&MemoryPlace { fd: plain.as_raw_fd() as u32, ..place }).is_err(),
            "it could shrink"
        );
    }

    #[test]
    fn nothing_is_opened_that_is_not_called_the_memory_of_a_ring() {
        let offer = MemoryOffer::new().expect("memory");
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let alike = File::from(memfd_create("something-else", flags).expect("memory"));
        alike.set_len(LEN as u64).expect("a length");
        fcntl(&alike, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).expect("it may be sealed");
        Memory::map(&alike).expect("memory").u64(NONCE).store(offer.place().nonce, Ordering::Release);
        let place = MemoryPlace { fd: alike.as_raw_fd() as u32, ..offer.place() };
        assert_eq!(Reader::open(&place).expect_err("another file").to_string(), "not the memory of a ring");
    }

    #[test]
    fn counters_that_cannot_be_are_an_error() {
        let (mut writer, reader) = pair();
        reader.memory.u64(READ).store(7, Ordering::Release);
        assert!(writer.write(b"x").is_err());
    }
}
