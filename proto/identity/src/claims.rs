//! Which coordinator of a run is the newest: numbered claims in a directory that all machines of the run see.
//!
//! ```text
//! OUTPUT_DIR/coordinator/claims/00000003        where the third one is called, and whose launcher has it;
//!                                             one more line when there is a fourth
//!                             00000003.beat   a counter that its launcher rewrites twice a second
//! ```
//!
//! A claim is a file that did not exist before: of several launchers that want the same number one gets it.
//! The highest number is the coordinator; one that finds a number above its own has lost the role and must
//! write nothing more. Numbers are never used twice.
//!
//! Whether a claim has a successor stands in the claim itself. Network file systems may show a new file to
//! other machines after a minute, but a known file as it was last closed (NFS: close-to-open consistency).

use std::{
    fs::{self, OpenOptions},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use coxswain_proto::{bounded, first, in_place};

use crate::owner::is_ours;

/// Between two beats of a role's holder.
pub const BEAT: Duration = Duration::from_millis(500);
/// Claims that are kept, for those who look while newer ones come.
const KEPT: u64 = 16;
/// Digits of a number in a file's name.
const DIGITS: usize = 8;
/// Most bytes of a claim: an address, an id, and a mark of each who has seen its successor.
const MAX_BYTES: u64 = 1 << 16;
/// Read by all whom the directory lets in.
const OPEN: u32 = 0o666;
/// What a claim says that has a successor.
const LOST: &str = "lost\n";

/// The role of one run.
#[derive(Clone, Debug)]
pub struct Claims {
    directory: PathBuf,
}

/// One coordinator's claim to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Counts the coordinators that launchers of several machines have started for the run.
    pub number: u64,
    /// Where it is called, as [`Address`](crate::Address) is written.
    pub address: String,
    /// The id of its launcher.
    pub launcher: String,
    /// Whether this user, or root, has written it.
    pub is_ours: bool,
}

impl Claims {
    /// The role of the run in this output directory.
    pub fn of_run(output_dir: &Path) -> Self {
        Self::at(output_dir.join("coordinator/claims"))
    }

    /// The role whose claims lie here.
    pub fn at(directory: PathBuf) -> Self {
        Self { directory }
    }

    /// Where its claims lie.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The newest claim that follows from this one, which may be the newest itself; nothing if it is not seen
    /// here, as on a file system of one machine alone.
    pub fn newest_from(&self, number: u64) -> Option<Claim> {
        let mut newest = self.first_from(number)?;
        while newest.1 {
            match self.first_from(newest.0.number + 1) {
                Some(next) => newest = next,
                // It is not seen here yet.
                None => break,
            }
        }
        Some(newest.0)
    }

    /// The newest claim; nothing where there is none. On a network file system it may be a minute old.
    pub fn newest(&self) -> Option<Claim> {
        let mut numbers = self.numbers().ok()?;
        numbers.sort_unstable();
        numbers.into_iter().rev().find_map(|number| self.newest_from(number))
    }

    /// Whether the holder of this number has lost the role: its claim says so, or has gone with the old ones.
    pub fn is_lost(&self, number: u64) -> bool {
        self.read(number).map_or_else(|| self.is_exceeded(number), |(_, lost)| lost)
    }

    /// Claims the role under the next number, whatever it is: for a launch, which is a user's wish.
    pub fn take(&self, address: &str, launcher: &str) -> io::Result<Claim> {
        fs::create_dir_all(&self.directory)?;
        let mut last = self.numbers()?.into_iter().max().unwrap_or(0);
        loop {
            if let Some(claim) = self.succeed(last, address, launcher)? {
                return Ok(claim);
            }
            last += 1;
        }
    }

    /// Claims the role after the claim of this number; nothing if another launcher has done so.
    pub fn succeed(&self, last: u64, address: &str, launcher: &str) -> io::Result<Option<Claim>> {
        let (address, launcher) = (address.to_owned(), launcher.to_owned());
        let claim = Claim { number: last + 1, address, launcher, is_ours: true };
        let content = format!("{}\n{}\n", claim.address, claim.launcher);
        // A number below the newest may be free again, and is not to be used twice.
        let made = !self.is_exceeded(claim.number)
            && first::make(&self.path(claim.number), OPEN, content.as_bytes())?;
        // Also for other launchers, which may have died in between.
        let before = self.numbers()?.into_iter().filter(|number| *number <= last);
        for number in before.filter(|number| self.read(*number).is_some_and(|(_, lost)| !lost)) {
            let mut before = in_place::open_by(OpenOptions::new().append(true), &self.path(number))?;
            before.write_all(LOST.as_bytes())?;
            before.sync_all()?;
        }
        for old in self.numbers()?.into_iter().filter(|old| old + KEPT < claim.number) {
            // Another launcher may do the same.
            let _ = fs::remove_file(self.path(old));
            let _ = fs::remove_file(self.beat_path(old));
        }
        Ok(made.then_some(claim))
    }

    /// Shows others twice a second that this claim's launcher lives, until the value is dropped. `lost` is
    /// called once if somebody else takes the role.
    pub fn hold(&self, number: u64, lost: impl FnOnce() + Send + 'static) -> io::Result<HeldClaim> {
        let (alive, dropped) = mpsc::channel::<()>();
        let claims = self.clone();
        let beating = move || {
            for count in 0_u64.. {
                // A disk that cannot be written now is tried again.
                let _ = beat(&claims.beat_path(number), count);
                if claims.is_lost(number) {
                    return lost();
                }
                match dropped.recv_timeout(BEAT) {
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        };
        thread::Builder::new().name("claims".into()).spawn(beating)?;
        Ok(HeldClaim { _alive: alive })
    }

    /// Whether there is a higher number.
    fn is_exceeded(&self, number: u64) -> bool {
        self.numbers().is_ok_and(|numbers| numbers.iter().any(|other| *other > number))
    }

    fn numbers(&self) -> io::Result<Vec<u64>> {
        let mut numbers = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let name = entry?.file_name();
            let name = name.to_str().filter(|name| name.len() == DIGITS);
            numbers.extend(name.and_then(|name| name.parse::<u64>().ok()));
        }
        Ok(numbers)
    }

    /// The claim of this number, or the next one that is there and whole: old ones are removed. Number 0 is
    /// that of a coordinator without a claim: those that lie here are an earlier launch's.
    fn first_from(&self, number: u64) -> Option<(Claim, bool)> {
        self.read(number).or_else(|| {
            if number == 0 {
                return None;
            }
            let mut above = self.numbers().ok()?;
            above.retain(|other| *other > number);
            above.sort_unstable();
            above.into_iter().find_map(|other| self.read(other))
        })
    }

    /// A claim, and whether it has a successor; nothing if it is not there or not whole.
    fn read(&self, number: u64) -> Option<(Claim, bool)> {
        let file = bounded::open(&self.path(number)).ok()?;
        let is_ours = is_ours(&file.metadata().ok()?);
        let mut text = String::new();
        file.take(MAX_BYTES).read_to_string(&mut text).ok()?;
        let (address, rest) = text.split_once('\n')?;
        let (launcher, rest) = rest.split_once('\n')?;
        let (address, launcher) = (address.to_owned(), launcher.to_owned());
        Some((Claim { number, address, launcher, is_ours }, !rest.is_empty()))
    }

    fn path(&self, number: u64) -> PathBuf {
        self.directory.join(format!("{number:0DIGITS$}"))
    }

    fn beat_path(&self, number: u64) -> PathBuf {
        self.directory.join(format!("{number:0DIGITS$}.beat"))
    }
}

/// Shows another count. The file stays the same one: a server's clients look at a new one later.
fn beat(path: &Path, count: u64) -> io::Result<()> {
    let mut file = in_place::open(path)?;
    file.set_len(0).and_then(|()| file.write_all(count.to_string().as_bytes()))
}

/// A role that is held; given up when this is dropped.
#[derive(Debug)]
pub struct HeldClaim {
    _alive: mpsc::Sender<()>,
}

/// Looks at the role from elsewhere.
#[derive(Debug)]
pub struct Watch {
    claims: Claims,
    /// The newest claim that is known.
    number: u64,
    /// The counter of its launcher, and since when it is what it is.
    beat: Option<(String, Instant)>,
}

impl Watch {
    /// Looks from this claim on.
    pub fn from(claims: Claims, number: u64) -> Self {
        Self { claims, number, beat: None }
    }

    /// Who has the role, and for how long there was no sign of their launcher. To be asked a few times a
    /// second. Nothing where no claim is seen.
    pub fn look(&mut self, now: Instant) -> Option<(Claim, Duration)> {
        let claim = self.claims.newest_from(self.number)?;
        let count = bounded::read_text(&self.claims.beat_path(claim.number), MAX_BYTES).unwrap_or_default();
        let unchanged =
            self.beat.as_ref().filter(|(known, _)| claim.number == self.number && *known == count);
        let since = unchanged.map_or(now, |(_, since)| *since);
        (self.number, self.beat) = (claim.number, Some((count, since)));
        Some((claim, now.saturating_duration_since(since)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims() -> (tempfile::TempDir, Claims) {
        let dir = tempfile::tempdir().unwrap();
        let claims = Claims::at(dir.path().to_owned());
        (dir, claims)
    }

    #[test]
    fn a_claim_that_its_successor_died_before_marking_is_lost_with_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let claims = Claims::of_run(dir.path());
        let first = claims.take("127.0.0.1:1", "first").unwrap();
        fs::write(claims.path(first.number + 1), "127.0.0.1:2\nsecond\n").unwrap();
        assert!(!claims.is_lost(first.number));
        let third = claims.take("127.0.0.1:3", "third").unwrap();
        assert!(claims.is_lost(first.number) && !claims.is_lost(third.number));
        assert_eq!(claims.newest_from(first.number), Some(third));
    }

    #[test]
    fn neither_a_beat_nor_the_mark_of_a_successor_is_written_through_a_link() {
        let (dir, claims) = claims();
        let target = dir.path().join("target");
        fs::write(&target, "node0:1\na\n").unwrap();
        for place in [claims.path(1), claims.beat_path(1)] {
            std::os::unix::fs::symlink(&target, place).unwrap();
        }
        assert!(claims.take("node1:1", "b").unwrap_err().to_string().contains("symbolic link"));
        assert!(beat(&claims.beat_path(1), 1).unwrap_err().to_string().contains("symbolic link"));
        assert_eq!(fs::read_to_string(target).unwrap(), "node0:1\na\n");
    }

    #[test]
    fn what_an_earlier_launch_has_left_follows_from_no_claim() {
        let dir = tempfile::tempdir().unwrap();
        let claims = Claims::of_run(dir.path());
        claims.take("127.0.0.1:1", "earlier").unwrap();
        assert_eq!(claims.newest_from(0), None);
    }

    #[test]
    fn one_of_many_gets_a_number_and_the_highest_is_the_coordinator() {
        let (_dir, claims) = claims();
        assert_eq!((claims.newest_from(1), claims.newest()), (None, None));
        let first = claims.take("node0:1", "a").unwrap();
        assert_eq!((first.number, claims.newest_from(1)), (1, Some(first)));
        let made: Vec<_> = thread::scope(|scope| {
            let claims = &claims;
            let succeed = |who: usize| claims.succeed(1, &format!("node{who}:1"), "b").unwrap();
            let threads: Vec<_> = (0..8).map(|who| scope.spawn(move || succeed(who))).collect();
            threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(made.len(), 1, "{made:?}");
        assert_eq!(claims.newest_from(1).as_ref(), made.first());
        assert!(claims.is_lost(1) && !claims.is_lost(2));
        assert_eq!(claims.take("node0:1", "a").unwrap().number, 3, "another launch");
        assert_eq!(claims.newest_from(1).unwrap().number, 3);
        assert_eq!(claims.newest().unwrap().number, 3);
    }

    #[test]
    fn a_claim_that_is_being_written_counts_against_its_predecessor_and_leads_nobody_astray() {
        let (dir, claims) = claims();
        let first = claims.take("node0:1", "a").unwrap();
        for half in ["", "node1", "node1:1\n"] {
            fs::write(claims.path(2), half).unwrap();
            assert_eq!(claims.newest_from(1).as_ref(), Some(&first), "{half:?}");
            // Its launcher has died before it could say so in the first.
            assert_eq!(claims.succeed(1, "node2:1", "c").unwrap(), None);
            assert!(claims.is_lost(1));
        }
        fs::write(dir.path().join("notes.txt"), "of a person").unwrap();
        let third = claims.take("node2:1", "c").unwrap();
        assert_eq!(third.number, 3);
        assert_eq!(claims.newest_from(1), Some(third), "one that stays half ends no way to the newest");
    }

    #[test]
    fn old_claims_go_and_numbers_do_not_come_back() {
        let (_dir, claims) = claims();
        (1..=KEPT + 5).for_each(|number| assert_eq!(claims.take("a:1", "a").unwrap().number, number));
        assert_eq!(claims.numbers().unwrap().len() as u64, KEPT + 1);
    }

    #[test]
    fn whose_claim_has_gone_has_lost_the_role_and_finds_the_newest() {
        let (_dir, claims) = claims();
        let newest = KEPT + 5;
        (1..=newest).for_each(|_| drop(claims.take("a:1", "a").unwrap()));
        assert!(claims.read(1).is_none() && claims.is_lost(1));
        assert_eq!(claims.newest_from(1).unwrap().number, newest);
        assert_eq!(claims.succeed(1, "b:1", "b").unwrap(), None, "a launcher that stood still for long");
        assert!(!claims.is_lost(newest) && !claims.is_lost(newest + 1), "nothing above it is seen");
    }

    #[test]
    fn a_holder_is_seen_to_live_and_hears_that_it_has_lost() {
        let (_dir, claims) = claims();
        let claim = claims.take("node0:1", "a").unwrap();
        let (told, lost) = mpsc::channel();
        let held = claims.hold(claim.number, move || told.send(()).unwrap()).unwrap();
        let (mut watch, start) = (Watch::from(claims.clone(), claim.number), Instant::now());
        let mut counted = 0;
        while counted < 3 {
            let (_, quiet) = watch.look(Instant::now()).unwrap();
            counted += u32::from(quiet.is_zero());
            thread::park_timeout(BEAT / 50);
            assert!(start.elapsed() < Duration::from_secs(60), "no beat is seen");
        }
        assert!(lost.try_recv().is_err());
        claims.take("node1:1", "b").unwrap();
        lost.recv_timeout(Duration::from_secs(60)).expect("its thread looks");
        drop(held);
        let (holder, quiet) = watch.look(start).unwrap();
        assert_eq!((holder.launcher.as_str(), quiet), ("b", Duration::ZERO));
        let (_, quiet) = watch.look(start + Duration::from_secs(5)).unwrap();
        assert_eq!(quiet, Duration::from_secs(5), "nobody holds it");
    }
}
