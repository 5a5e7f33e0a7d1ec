//! The thread that keeps a run's checkpoints in its bucket while training goes on.
//!
//! It looks twice a second what the disk has: nothing that trains knows of it or waits for it. What cannot be
//! uploaded is tried again after a minute, or as the next checkpoint; said is that once.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::PathBuf,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use coxswain_proto::{human, run_spec::RunSpec};
use tokio::sync::oneshot;

use super::{
    error::{BucketError, disk},
    index::Set,
    local::{self, Local, Record},
    owner::Owner,
    place,
};
use crate::{
    clock,
    supervise::console::{Console, Terminal},
};

/// Between two looks at the disk.
const LOOK: Duration = Duration::from_millis(500);
/// Before what failed is tried again, beside the attempts of each request.
const AGAIN: Duration = Duration::from_secs(60);

/// What an uploader works for.
pub struct UploadJob {
    /// The run, as it is launched.
    pub spec: RunSpec,
    /// Address.
    pub address: String,
    /// Launcher's id.
    pub launcher: String,
    /// Where lines are shown.
    pub terminal: Arc<Terminal>,
    /// Hears why this launch is one too many.
    pub superseded: tokio::sync::mpsc::Sender<String>,
}

/// The thread, which ends with this value or when it is told to finish.
pub struct Uploader {
    finish: mpsc::Sender<oneshot::Sender<Result<(), BucketError>>>,
}

/// The file of a journal's copy: another one has another number, or another time.
type Copy = (u64, i64, i64);

struct Thread {
    of: UploadJob,
    /// Absent where the run is still to be taken.
    owner: Option<Owner>,
    /// The copy that was uploaded last, or was tried.
    seen: Option<Copy>,
    again: Option<Instant>,
    /// The copy of which a file was missing: what is being replaced is whole half a second later.
    missed: Option<Copy>,
    failing: bool,
    /// Whether another launch has the run.
    superseded: bool,
}

impl Uploader {
    /// Starts to look. Without an `owner` the run is taken by the thread, as soon as the bucket answers.
    pub fn start(of: UploadJob, owner: Option<Owner>) -> std::io::Result<Self> {
        let (finish, orders) = mpsc::channel::<oneshot::Sender<_>>();
        let mut thread =
            Thread { of, owner, seen: None, again: None, missed: None, failing: false, superseded: false };
        std::thread::Builder::new().name("bucket".into()).spawn(move || {
            loop {
                match orders.recv_timeout(LOOK) {
                    Ok(reply) => return drop(reply.send(thread.finish())),
                    Err(mpsc::RecvTimeoutError::Timeout) => {}
                    Err(mpsc::RecvTimeoutError::Disconnected) => return,
                }
                thread.look();
            }
        })?;
        Ok(Self { finish })
    }

    /// Uploads the last checkpoint and what the run has left.
    pub async fn finish(&self) -> Result<(), BucketError> {
        let (reply, answer) = oneshot::channel();
        // The thread lives as long as this value, and answers once, unless it has panicked.
        self.finish.send(reply).map_err(|_| BucketError::Thread)?;
        answer.await.unwrap_or(Err(BucketError::Thread))
    }
}

impl Thread {
    /// Uploads what is new.
    fn look(&mut self) {
        let Some(found) = local::newest_copied(&self.output()).filter(|_| !self.superseded) else { return };
        let Ok(copy) = fs::metadata(&found.journal) else { return };
        let copy = (copy.ino(), copy.mtime(), copy.mtime_nsec());
        let is_due = self.again.is_some_and(|at| clock::now() >= at);
        if self.seen == Some(copy) && !is_due {
            return;
        }
        self.again = None;
        match self.keep(&found) {
            Ok(true) => (self.seen, self.failing) = (Some(copy), false),
            // Gone meanwhile: there is a newer one.
            Ok(false) => {}
            Err(error) if error.is_missing() && self.missed.replace(copy) != Some(copy) => {}
            Err(error @ BucketError::Superseded { .. }) => {
                self.superseded = true;
                // A launcher that no longer listens is ending, and will ask how it went.
                drop(self.of.superseded.blocking_send(error.to_string()));
            }
            Err(error) => {
                (self.seen, self.again) = (Some(copy), Some(clock::now() + AGAIN));
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::warn!(%error, "the checkpoint of step {} could not be uploaded; {}; training continues, and the upload will be retried", found.step, self.safe());
                }
            }
        }
    }

    fn finish(&mut self) -> Result<(), BucketError> {
        let output = self.output();
        if let Some(found) = local::newest(&output)
            && !self.keep(&found)?
        {
            // Nothing that is still alive takes checkpoints away.
            let gone = format!("the checkpoint of step {} was removed while it was read", found.step);
            return Err(disk(&output)(io::Error::new(io::ErrorKind::NotFound, gone)));
        }
        let results = local::results(&output)?;
        self.owner()?.leave(&results)
    }

    /// Uploads a set, unless the bucket has it. False if it is gone.
    fn keep(&mut self, found: &Local) -> Result<bool, BucketError> {
        let (begin, keep) = (clock::now(), self.of.spec.train.keep_checkpoints);
        let Some(sources) = found.open()? else { return Ok(false) };
        let owner = self.owner()?;
        let is_there = owner.index().newest().is_some_and(|newest| {
            let of = |path: &str| newest.files.iter().find(|kept| kept.path == path);
            newest.step == found.step
                && sources
                    .iter()
                    .all(|source| of(&source.path).is_some_and(|kept| kept.entry == source.entry))
        });
        if is_there {
            return Ok(true);
        }
        let known = owner.index().newest().map(|newest| newest.step);
        owner.keep(found.step, &sources, keep)?;
        self.record()?;
        if known == Some(found.step) {
            // Its journal has come to the run's end.
            return Ok(true);
        }
        let bytes = sources.iter().map(|source| source.entry.bytes).sum();
        self.of.terminal.line(&format!(
            "checkpoint of step {} is in {}: {} in {}",
            found.step,
            self.of.address,
            human::bytes(bytes),
            human::time(begin.elapsed()),
        ));
        Ok(true)
    }

    /// Leaves word of what the bucket has.
    fn record(&mut self) -> Result<(), BucketError> {
        let output = self.output();
        let newest = self.owner()?.index().newest();
        let (step, bytes) = (newest.map(|set| set.step), newest.map_or(0, Set::bytes));
        let record = Record::load(&output).unwrap_or_default();
        Record { step, bytes, ..record }.write(&output)
    }

    fn owner(&mut self) -> Result<&mut Owner, BucketError> {
        let of = &self.of;
        let owner = match self.owner.take() {
            Some(owner) => owner,
            None => place::take(&of.spec, &of.address, &of.launcher)?,
        };
        Ok(self.owner.insert(owner))
    }

    /// What a launch elsewhere would go on from.
    fn safe(&self) -> String {
        let newest = self.owner.as_ref().and_then(|owner| owner.index().newest());
        newest.map_or_else(
            || "the bucket has no checkpoint yet".to_owned(),
            |set| format!("the newest one in the bucket is of step {}", set.step),
        )
    }

    fn output(&self) -> PathBuf {
        PathBuf::from(&self.of.spec.run.output_dir)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_thread_that_is_gone_or_goes_is_an_error_and_no_success() {
        let (finish, orders) = mpsc::channel();
        drop(orders);
        let gone = Uploader { finish }.finish().await;
        assert!(matches!(gone, Err(BucketError::Thread)), "{gone:?}");
        let (finish, orders) = mpsc::channel();
        let going = std::thread::spawn(move || drop(orders.recv()));
        let gone = Uploader { finish }.finish().await;
        assert!(matches!(gone, Err(BucketError::Thread)), "{gone:?}");
        going.join().unwrap();
    }
}
