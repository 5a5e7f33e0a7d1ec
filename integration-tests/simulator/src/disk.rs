//! A disk that fails as disks do, under the real journal. What is written is in the machine's cache until it
//! is synced. A process that is killed leaves the cache behind; a machine that loses power leaves of each
//! write that was not synced nothing, some sectors, or all.

use std::{
    io::{Error, ErrorKind},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use coxswain_coordinator::journal::Disk;
use redb::{Builder, Database, DatabaseError, StorageBackend};

use crate::random::Random;

/// What a disk writes whole or not at all.
const SECTOR: usize = 512;
/// Between two tries of a coordinator that waits for room.
const LOOK: Duration = Duration::from_millis(500);

/// The disk under a run's journal.
#[derive(Clone, Debug)]
pub struct SimulatedDisk(Arc<Mutex<State>>);

/// What the disk does wrong, and until when.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    pub full_until: Duration,
    pub read_only_until: Duration,
    pub slow_until: Duration,
    /// Says of every sync that it is done, and does nothing.
    pub lies_until: Duration,
    /// The next sync fails; what it was to write still waits for the one after it.
    pub fails_sync: bool,
    /// The next write is lost, though it is synced.
    pub loses: bool,
    /// The next write lands elsewhere.
    pub misdirects: bool,
    /// Calls until somebody else takes the role of the process that makes them, and a copy of what is there.
    pub taken_after: Option<u64>,
    /// Writes until the process that makes them is killed.
    pub kills_after: Option<u64>,
}

#[derive(Debug)]
struct State {
    random: Random,
    now: Duration,
    /// What the calls since `now` have taken.
    took: Duration,
    /// What there is after a loss of power.
    durable: Vec<u8>,
    /// What the machine sees.
    cached: Vec<u8>,
    unsynced: Vec<Change>,
    faults: Faults,
    /// The newest claim to the role, and its own; and what its successor has taken over.
    claims: Arc<AtomicU64>,
    claim: u64,
    taken: Option<Vec<u8>>,
    /// Processes that had it open: only the newest one is heard.
    opened: u64,
    killed: bool,
}

#[derive(Debug)]
enum Change {
    Length(usize),
    Bytes(usize, Vec<u8>),
}

impl SimulatedDisk {
    pub fn new(seed: u64, claims: &Arc<AtomicU64>) -> Self {
        Self::with(Vec::new(), Random::new(seed), claims, 1)
    }

    /// A file of the successor's own, with what it has found; the process that has this one open goes on.
    pub fn inherited(&self, claim: u64) -> Self {
        let mut state = self.state();
        let found = state.taken.take().unwrap_or_else(|| state.cached.clone());
        let random = Random::new(state.random.next());
        Self::with(found, random, &state.claims, claim)
    }

    fn with(found: Vec<u8>, random: Random, claims: &Arc<AtomicU64>, claim: u64) -> Self {
        Self(Arc::new(Mutex::new(State {
            random,
            now: Duration::ZERO,
            took: Duration::ZERO,
            durable: found.clone(),
            cached: found,
            unsynced: Vec::new(),
            faults: Faults::default(),
            claims: claims.clone(),
            claim,
            taken: None,
            opened: 0,
            killed: false,
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A moment from which calls are timed.
    pub fn at(&self, now: Duration) {
        let mut state = self.state();
        (state.now, state.took) = (now, Duration::ZERO);
    }

    /// How long calls have taken since then.
    pub fn took(&self) -> Duration {
        self.state().took
    }

    pub fn breaks(&self, how: impl FnOnce(&mut Faults)) {
        how(&mut self.state().faults);
    }

    /// Whether nothing can be written for now.
    pub fn refuses(&self, now: Duration) -> bool {
        let state = self.state();
        now < state.faults.full_until.max(state.faults.read_only_until)
    }

    /// Whether what is said to be durable now may not be.
    pub fn lies(&self, now: Duration) -> bool {
        now < self.state().faults.lies_until
    }

    /// Whether the process that writes was killed in a write.
    pub fn has_killed(&self) -> bool {
        self.state().killed
    }

    /// Whether a copy waits for the successor.
    pub fn has_been_taken(&self) -> bool {
        self.state().taken.is_some()
    }

    /// The process that has it open is gone: nothing that it writes from now on arrives.
    pub fn process_gone(&self) {
        self.state().opened += 1;
    }

    /// The machine is gone, and comes back with what is durable.
    pub fn lose_power(&self) {
        let mut state = self.state();
        state.opened += 1;
        for change in std::mem::take(&mut state.unsynced) {
            match (state.random.below(3), change) {
                (0, _) => {}
                (1, Change::Bytes(offset, bytes)) => {
                    for (number, sector) in bytes.chunks(SECTOR).enumerate() {
                        if state.random.chance(0.5) {
                            write(&mut state.durable, offset + number * SECTOR, sector);
                        }
                    }
                }
                (_, change) => change.reach(&mut state.durable),
            }
        }
        state.cached = state.durable.clone();
    }
}

impl Change {
    fn reach(&self, disk: &mut Vec<u8>) {
        match self {
            Self::Length(length) => disk.resize(*length, 0),
            Self::Bytes(offset, bytes) => write(disk, *offset, bytes),
        }
    }
}

fn write(disk: &mut Vec<u8>, offset: usize, bytes: &[u8]) {
    if disk.len() < offset + bytes.len() {
        disk.resize(offset + bytes.len(), 0);
    }
    disk[offset..offset + bytes.len()].copy_from_slice(bytes);
}

impl Disk for SimulatedDisk {
    fn open(&self, store: &Builder) -> Result<Database, DatabaseError> {
        let mut state = self.state();
        state.opened += 1;
        state.killed = false;
        let process = state.opened;
        drop(state);
        store.create_with_backend(OpenFile { disk: self.clone(), process })
    }

    fn wait(&self) {
        self.state().took += LOOK;
    }
}

/// The disk as a process has it open.
#[derive(Debug)]
struct OpenFile {
    disk: SimulatedDisk,
    process: u64,
}

impl OpenFile {
    fn state(&self) -> Result<MutexGuard<'_, State>, Error> {
        let state = self.disk.state();
        match state.opened == self.process && !state.killed {
            true => Ok(state),
            false => Err(Error::other("the process is gone")),
        }
    }
}

impl State {
    /// What a call that changes something finds.
    fn touch(&mut self) -> Result<(), Error> {
        let now = self.now + self.took;
        match self.faults.taken_after {
            Some(0) => {
                self.faults.taken_after = None;
                let claim = self.claim;
                if self.claims.compare_exchange(claim, claim + 1, SeqCst, SeqCst).is_ok() {
                    self.taken = Some(self.cached.clone());
                }
            }
            Some(left) => self.faults.taken_after = Some(left - 1),
            None => {}
        }
        if let Some(left) = &mut self.faults.kills_after {
            if *left == 0 {
                (self.faults.kills_after, self.killed) = (None, true);
                return Err(Error::other("the process is killed"));
            }
            *left -= 1;
        }
        if now < self.faults.read_only_until {
            return Err(ErrorKind::ReadOnlyFilesystem.into());
        }
        // What has its blocks already can be written.
        if now < self.faults.full_until && self.random.chance(0.5) {
            return Err(ErrorKind::StorageFull.into());
        }
        Ok(())
    }

    fn change(&mut self, change: Change) {
        change.reach(&mut self.cached);
        if std::mem::take(&mut self.faults.loses) {
            return;
        }
        let elsewhere = match &change {
            Change::Bytes(_, bytes) if self.faults.misdirects && !self.cached.is_empty() => {
                let sectors = (self.cached.len() / SECTOR) as u64;
                Some(Change::Bytes(self.random.below(sectors) as usize * SECTOR, bytes.clone()))
            }
            _ => None,
        };
        self.faults.misdirects &= elsewhere.is_none();
        self.unsynced.push(elsewhere.unwrap_or(change));
    }
}

impl StorageBackend for OpenFile {
    fn len(&self) -> Result<u64, Error> {
        Ok(self.state()?.cached.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        let state = self.state()?;
        let begin = offset as usize;
        let bytes = state.cached.get(begin..begin + out.len()).ok_or(ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(bytes);
        Ok(())
    }

    fn set_len(&self, len: u64) -> Result<(), Error> {
        let mut state = self.state()?;
        state.touch()?;
        state.change(Change::Length(len as usize));
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        let mut state = self.state()?;
        let (offset, done) = (offset as usize, state.touch());
        if state.killed {
            // Of the write that it was killed in, the beginning may be there.
            let whole = (data.len() / SECTOR) as u64;
            let sectors = state.random.below(whole + 1) as usize;
            state.change(Change::Bytes(offset, data[..sectors * SECTOR].to_vec()));
        }
        done?;
        state.change(Change::Bytes(offset, data.to_vec()));
        Ok(())
    }

    fn sync_data(&self) -> Result<(), Error> {
        let mut state = self.state()?;
        state.touch()?;
        let now = state.now + state.took;
        let most = if now < state.faults.slow_until { 2.0 } else { 0.002 };
        let takes = Duration::from_secs_f64(most * state.random.unit());
        state.took += takes;
        if now < state.faults.lies_until {
            return Ok(());
        }
        if std::mem::take(&mut state.faults.fails_sync) {
            return Err(Error::other("an error of the disk"));
        }
        for change in std::mem::take(&mut state.unsynced) {
            change.reach(&mut state.durable);
        }
        Ok(())
    }
}
