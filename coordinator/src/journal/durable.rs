//! The journal on disk: one embedded database, `journal.redb`, in the state directory.
//!
//! A database that was not closed in order is brought back to its last whole transaction when it is opened,
//! with a warning. Every row is read then, so that a damaged one is refused at once and by name, and not when
//! the run needs it.

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    rc::Rc,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard},
};

use coxswain_proto::{ids::Step, run_spec::RunSpec};
use redb::{Database, DatabaseError, ReadableDatabase, WriteTransaction};
use tokio_util::sync::CancellationToken;

use super::{
    Change, History, Identity, Journal, JournalError, JournalReader, LedgerEntry, copies,
    disk::Location,
    identity,
    reading::{Contents, Reader},
    room,
    rows::{self, CACHE_PHASES, CACHES, FACTS, FAILURES, GENERATIONS, NODES, STEPS, WORKERS, json},
};
use crate::core::{action::Record, past::Past};

/// A journal on disk.
pub struct Durable {
    store: Store,
    place: Location,
    /// Whether workers have state that only they have.
    under_way: bool,
    /// Whether checkpoints go to a bucket, and the journal with them.
    copies: bool,
    /// Once it is cancelled, room is not waited for any more.
    stop: CancellationToken,
}

impl Durable {
    /// Opens the journal of a run, or begins one. Without a `run_id` of its own the run takes the journal's,
    /// or else `fresh`.
    ///
    /// Refuses the journal of another run, one that is open elsewhere, and one that is damaged. What is
    /// learned makes a run another one, not its id: that is a launch's, and a scheduler gives every job
    /// another.
    pub fn open(
        place: impl Into<Location>,
        spec: &RunSpec,
        run_id: Option<&str>,
        fresh: &str,
        life: Life,
    ) -> Result<(Self, Identity, RecoveredHistory), JournalError> {
        let place = place.into();
        let (database, contents) = open_whole(&place)?;
        let copies = spec.run.bucket.is_some();
        let mut journal = Self {
            store: Store::with_database(database),
            place,
            under_way: life == Life::Restarted,
            copies,
            stop: CancellationToken::new(),
        };
        let known = contents.identity.as_ref().map(|identity| identity.run_id.as_str());
        let ours = Identity::new(spec, run_id.or(known).unwrap_or(fresh).to_owned());
        let (lives, past) = (contents.lives, contents.past);
        let step = past.committed.unwrap_or_default();
        let changed = match contents.identity {
            Some(theirs) => identity::changes(&journal.place.directory, &theirs, spec, step)?,
            None => Vec::new(),
        };
        let changes = match life {
            Life::Anew => Vec::new(),
            Life::Again | Life::Restarted => [contents.changes, changed.clone()].concat(),
        };
        let begins = match life {
            Life::Anew => Begins::WithNothing(past.forgotten()),
            Life::Again if past.end.is_some() => Begins::WithWhatWasLearned(past.settled()),
            Life::Again | Life::Restarted => Begins::AsItWas(past),
        };
        journal.begin_life(&ours, lives + 1, &changes, &begins)?;
        journal.under_way = true;
        Ok((journal, ours, RecoveredHistory { lives, past: begins.into_past(), changed }))
    }

    /// A journal that is begun beside a checkpoint says so to those who audit it.
    pub fn begin_beside(&mut self, checkpoint: Step) -> Result<(), JournalError> {
        let change = Change {
            step: checkpoint,
            key: "coordinator/journal.redb".into(),
            from: "missing or unreadable".into(),
            to: "new, without a record of earlier steps".into(),
        };
        let changes = json(&[change]);
        self.write(|write| {
            write.open_table(FACTS)?.insert("changes", changes.as_str())?;
            Ok(())
        })
    }

    /// Waits for room on its disk until `stop` is cancelled, and no longer.
    pub fn until(self, stop: CancellationToken) -> Self {
        Self { stop, ..self }
    }

    /// What is remembered is what the tables say from here on, so that the next life remembers the same.
    fn begin_life(
        &mut self,
        identity: &Identity,
        life: u32,
        changes: &[Change],
        begins: &Begins,
    ) -> Result<(), JournalError> {
        self.write(|write| {
            {
                let mut facts = write.open_table(FACTS)?;
                facts.insert("identity", json(identity).as_str())?;
                facts.insert("lives", json(&life).as_str())?;
                facts.insert("changes", json(&changes).as_str())?;
            }
            // Every table exists from here on.
            for table in [GENERATIONS, STEPS, NODES, WORKERS, FAILURES, CACHE_PHASES, CACHES] {
                write.open_table(table)?;
            }
            match begins {
                Begins::AsItWas(_) => Ok(()),
                Begins::WithWhatWasLearned(past) => rows::replace(write, past),
                Begins::WithNothing(past) => {
                    for records in [STEPS, FAILURES] {
                        write.open_table(records)?.retain(|_, _| false)?;
                    }
                    rows::replace(write, past)
                }
            }
        })
    }

    /// One durable transaction; in a run that is under way, as soon as there is room for it.
    fn write(
        &mut self,
        body: impl Fn(&WriteTransaction) -> Result<(), redb::Error>,
    ) -> Result<(), JournalError> {
        let mut wait = room::Wait::default();
        loop {
            match self.write_once(&body) {
                Ok(()) => {
                    wait.is_over(&self.place);
                    return Ok(());
                }
                Err(error) if self.under_way && room::is_missing(&error) => {}
                Err(error) => return Err(self.failed("write", error)),
            }
            // The store holds its lock until it is closed.
            self.store.replace(None);
            while !self.store.is_open() {
                if self.stop.is_cancelled() {
                    return Err(JournalError::Stopped { directory: self.place.directory.clone() });
                }
                wait.pause(&self.place);
                self.store.replace(room::open_again(&self.place)?);
            }
        }
    }

    fn write_once(
        &self,
        body: &impl Fn(&WriteTransaction) -> Result<(), redb::Error>,
    ) -> Result<(), redb::Error> {
        let opened = self.store.opened();
        let write = opened.as_ref().ok_or(redb::Error::DatabaseClosed)?.begin_write()?;
        body(&write)?;
        write.commit()?;
        Ok(())
    }

    fn failed(&self, action: &'static str, error: impl std::fmt::Display) -> JournalError {
        JournalError::Store { action, directory: self.place.directory.clone(), reason: error.to_string() }
    }
}

/// The database, of which one thread writes and another one reads; absent while there is no room to open it
/// again. Its lock is held by both at the same time: it is taken alone only to close or open the database.
#[derive(Clone)]
struct Store(Arc<RwLock<Option<Database>>>);

impl Store {
    fn with_database(database: Database) -> Self {
        Self(Arc::new(RwLock::new(Some(database))))
    }

    fn opened(&self) -> RwLockReadGuard<'_, Option<Database>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_open(&self) -> bool {
        self.opened().is_some()
    }

    fn replace(&self, database: Option<Database>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = database;
    }
}

impl Journal for Durable {
    fn append(&mut self, records: &[Record]) -> Result<(), JournalError> {
        self.write(|write| records.iter().try_for_each(|record| rows::append(write, record)))
    }

    fn reader(&self) -> Box<dyn JournalReader> {
        Box::new(DurableReader { store: self.store.clone(), directory: self.place.directory.clone() })
    }

    fn copy_for(&self, checkpoint: Step) -> Result<(), JournalError> {
        match self.copies {
            true => {
                copies::make(&self.place.directory, checkpoint).map_err(|error| self.failed("copy", error))
            }
            false => Ok(()),
        }
    }

    fn close(&mut self) {
        self.store.replace(None);
    }
}

/// Reads a journal, each time in a transaction of its own.
struct DurableReader {
    store: Store,
    directory: PathBuf,
}

impl DurableReader {
    fn read<T>(&self, rows: impl FnOnce(Reader<'_>) -> Result<T, JournalError>) -> Result<T, JournalError> {
        let opened = self.store.opened();
        let begin = || -> Result<_, redb::Error> {
            Ok(opened.as_ref().ok_or(redb::Error::DatabaseClosed)?.begin_read()?)
        };
        let read = begin().map_err(|error| JournalError::Store {
            action: "read",
            directory: self.directory.clone(),
            reason: error.to_string(),
        })?;
        rows(Reader::new(&read, &self.directory))
    }
}

impl JournalReader for DurableReader {
    fn ledger(&self, first: Step, limit: usize) -> Result<Vec<LedgerEntry>, JournalError> {
        self.read(|rows| rows.steps(first, limit))
    }

    fn history(&self) -> Result<History, JournalError> {
        self.read(|rows| rows.history())
    }
}

/// Why a coordinator begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// The run is to begin anew, whatever was trained: nothing is remembered but the numbers that must not be
    /// used twice.
    Anew,
    /// The run is to go on, be it over or not.
    Again,
    /// Another coordinator of the run was lost a moment ago.
    Restarted,
}

/// What a life begins with.
enum Begins {
    /// All that was recorded.
    AsItWas(Past),
    /// The run was over: what was learned, and the records.
    WithWhatWasLearned(Past),
    /// Numbers that must not be used twice; the records are empty.
    WithNothing(Past),
}

impl Begins {
    fn into_past(self) -> Past {
        match self {
            Self::AsItWas(past) | Self::WithWhatWasLearned(past) | Self::WithNothing(past) => past,
        }
    }
}

/// What earlier lives of the coordinator left behind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecoveredHistory {
    /// Starts of the coordinator before this one.
    pub lives: u32,
    /// What they recorded.
    pub past: Past,
    /// What the run file says otherwise than in the life before.
    pub changed: Vec<Change>,
}

/// Opens the database in a directory, and reads all of it.
///
/// The store may panic over bytes that it has not written; that is damage as well, and not a reason to die.
pub(super) fn open_whole(place: &Location) -> Result<(Database, Contents), JournalError> {
    let directory = place.directory.as_path();
    let store =
        |action, reason: String| JournalError::Store { action, directory: directory.to_path_buf(), reason };
    let opened = catch_unwind(AssertUnwindSafe(|| -> Result<_, JournalError> {
        let repaired = Rc::new(Cell::new(false));
        let seen = repaired.clone();
        let mut settings = rows::store();
        settings.set_repair_callback(move |_| seen.set(true));
        let mut database = place.disk.open(&settings).map_err(|error| match error {
            DatabaseError::DatabaseAlreadyOpen => JournalError::InUse { directory: directory.to_path_buf() },
            other => store("open", other.to_string()),
        })?;
        let whole = database.check_integrity().map_err(|error| store("check", error.to_string()))?;
        if !whole || repaired.get() {
            tracing::warn!(
                target: "coxswain::run",
                directory = %directory.display(),
                "the previous coordinator was killed or crashed: continuing from the last complete record of its journal"
            );
        }
        let read = database.begin_read().map_err(|error| store("read", error.to_string()))?;
        let contents = Reader::new(&read, directory).everything()?;
        Ok((database, contents))
    }));
    opened.unwrap_or_else(|_| Err(store("read", "the database library panicked while reading it".into())))
}

#[cfg(test)]
mod tests;
