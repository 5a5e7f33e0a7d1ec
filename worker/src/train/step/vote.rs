//! The vote that makes a step a transaction.
//!
//! After its micro-batches, and before any gradient moves, every rank tells all others in one small
//! all-gather how it fared, what it was asked to do, and its share of the loss. Every rank reads the same
//! ballots in the same order, so all come to the same verdict without another message: commit, shrink and
//! retry, or end; and commands take effect at the same boundary everywhere.
//!
//! A rank whose attempt is lost votes at once, while others are still at theirs. They see its ballot between
//! two layers ([`Lookout`]), give their attempt up, and vote, too:
//!
//! ```text
//! rank 2   ▓▓▓ out of memory ─ vote ┐
//! rank 3   ▓▓▓▓ ballot of 2 is there ─ vote ┐
//! rank 0   ▓▓▓▓▓ ballots of 3 and 2 are there ─ vote ┐
//! rank 1   ▓▓▓▓▓▓ ballots of 0, 3 and 2 are there ─ vote ── verdict: out of memory on rank 2
//! ```
//!
//! So each rank whose micro-batch runs goes on for at most a layer longer than the one before it, whatever
//! else carries large buffers; one that computes features to keep finishes those. Nothing depends on it: a
//! rank that sees no ballot finishes its attempt, and the step is tried again or ends as it would have. (A
//! rank that gives up does not learn whether its own attempt would have failed: a second damaged sample is
//! found by the next attempt.) A ballot is seen only for the vote that it is cast in, so one attempt's cannot
//! end the next.

use coxswain_proto::ids::Rank;

use crate::{
    collective::{Buf, BufMut, Collective, CollectiveError, GatherPeek},
    link::Commands,
};

/// How a rank's micro-batches ended, from best to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Vote {
    /// Gradients are summed up and finite as far as this rank can tell.
    Ok,
    /// Another rank's attempt was lost, so this one's was given up.
    GaveUp,
    /// A loss or a gradient is not finite.
    NotFinite,
    /// Memory ran out; the same samples may fit in smaller micro-batches.
    OutOfMemory,
    /// Bad data, a broken file: a retry would fail again.
    Failed,
}

impl Vote {
    const ALL: [Self; 5] = [Self::Ok, Self::GaveUp, Self::NotFinite, Self::OutOfMemory, Self::Failed];

    fn code(self) -> f64 {
        f64::from(self as u8)
    }

    fn of_code(code: f64) -> Self {
        Self::ALL.into_iter().find(|fared| fared.code() == code).unwrap_or(Self::Failed)
    }
}

/// What one rank says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ballot {
    /// How its micro-batches ended.
    pub fared: Vote,
    /// What its session was asked for so far.
    pub commands: Commands,
    /// Sum of losses over its valid elements.
    pub loss_sum: f64,
    /// Valid elements.
    pub valid_count: f64,
    /// Whether its system swaps it out, step after step: the next step should take less.
    pub pressed: bool,
    /// How many losses it remembers, and above which this step's is a spike
    /// ([`spike`](crate::train::guards)).
    pub spike_limit: (usize, f64),
}

/// What all ranks decide, the same on each.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// The worst that befell any rank, and the first rank it befell.
    pub fared: (Vote, Rank),
    /// Ranks that gave their attempt up.
    pub gave_up: u32,
    /// The union of all ranks' commands.
    pub commands: Commands,
    /// Sum of losses over all ranks.
    pub loss_sum: f64,
    /// Valid elements over all ranks.
    pub valid_count: f64,
    /// The first rank that is swapped out.
    pub pressed: Option<Rank>,
    /// The limit of the first rank that remembers most.
    pub spike_limit: (usize, f64),
}

impl Verdict {
    /// Over all valid elements.
    pub fn mean_loss(&self) -> f64 {
        self.loss_sum / self.valid_count.max(1.0)
    }
}

const FIELDS: usize = 12;

impl Ballot {
    fn encode(&self) -> [f64; FIELDS] {
        let commands = self.commands;
        [
            self.fared.code(),
            f64::from(u8::from(commands.pause)),
            f64::from(u8::from(commands.stop)),
            f64::from(commands.checkpoints),
            f64::from(commands.memory_reports),
            self.loss_sum,
            self.valid_count,
            f64::from(u8::from(commands.regroup) + u8::from(commands.hand_over)),
            f64::from(u8::from(self.pressed)),
            f64::from(commands.memory_reset),
            self.spike_limit.0 as f64,
            self.spike_limit.1,
        ]
    }
}

/// Casts this rank's ballot and returns what all decided.
pub fn cast(ballot: &Ballot, comm: &mut dyn Collective) -> Result<Verdict, CollectiveError> {
    let mut ballots = vec![0.0; FIELDS * comm.world()];
    comm.all_gather(Buf::F64(&ballot.encode()), BufMut::F64(&mut ballots))?;
    Ok(count(&ballots))
}

/// Looks out for ballots of others while this rank is still at its micro-batches.
pub struct Lookout(Option<GatherPeek>);

impl Lookout {
    /// For the next vote of these ranks.
    pub fn for_ranks(comm: &dyn Collective) -> Self {
        Self(comm.ahead(FIELDS * comm.world()))
    }

    /// Sees nothing.
    pub fn blind() -> Self {
        Self(None)
    }

    /// Whether a ballot has come that says of its rank's attempt that it is lost. Then this step is not
    /// committed, whatever this rank does.
    pub fn sees_loss(&self) -> bool {
        let lost = |(_, ballot): &(Rank, Vec<f64>)| Vote::of_code(ballot[0]) != Vote::Ok;
        self.0.as_ref().is_some_and(|ahead| ahead.shares().iter().any(lost))
    }
}

fn count(ballots: &[f64]) -> Verdict {
    let mut verdict = Verdict {
        fared: (Vote::Ok, Rank(0)),
        gave_up: 0,
        commands: Commands::default(),
        loss_sum: 0.0,
        valid_count: 0.0,
        pressed: None,
        spike_limit: (0, f64::INFINITY),
    };
    for (rank, ballot) in ballots.chunks_exact(FIELDS).enumerate() {
        let fared = Vote::of_code(ballot[0]);
        verdict.gave_up += u32::from(fared == Vote::GaveUp);
        if fared > verdict.fared.0 {
            verdict.fared = (fared, Rank(rank as u32));
        }
        verdict.commands.pause |= ballot[1] != 0.0;
        verdict.commands.stop |= ballot[2] != 0.0;
        verdict.commands.checkpoints = verdict.commands.checkpoints.max(ballot[3] as u32);
        verdict.commands.memory_reports = verdict.commands.memory_reports.max(ballot[4] as u32);
        verdict.loss_sum += ballot[5];
        verdict.valid_count += ballot[6];
        verdict.commands.regroup |= ballot[7] != 0.0;
        verdict.commands.hand_over |= ballot[7] > 1.0;
        verdict.commands.memory_reset = verdict.commands.memory_reset.max(ballot[9] as u32);
        if ballot[10] as usize > verdict.spike_limit.0 {
            verdict.spike_limit = (ballot[10] as usize, ballot[11]);
        }
        if ballot[8] != 0.0 {
            verdict.pressed = verdict.pressed.or(Some(Rank(rank as u32)));
        }
    }
    verdict
}

#[cfg(test)]
mod tests {
    use std::{
        cell::Cell,
        thread,
        time::{Duration, Instant},
    };

    use super::*;
    use crate::{
        collective::{Solo, loopback_over},
        memory::{self, GuardedError},
    };

    fn ballot(fared: Vote) -> Ballot {
        let (commands, spike_limit) = (Commands::default(), (0, f64::INFINITY));
        Ballot { fared, commands, loss_sum: 1.5, valid_count: 2.0, pressed: false, spike_limit }
    }

    fn count_all(ballots: &[Ballot]) -> Verdict {
        count(&ballots.iter().flat_map(Ballot::encode).collect::<Vec<_>>())
    }

    #[test]
    fn one_rank_out_of_memory_is_every_ranks_business() {
        let verdict = count_all(&[ballot(Vote::Ok), ballot(Vote::OutOfMemory), ballot(Vote::Ok)]);
        assert_eq!(verdict.fared, (Vote::OutOfMemory, Rank(1)));
    }

    #[test]
    fn who_gave_up_is_counted_and_is_not_the_cause() {
        let gave_up = ballot(Vote::GaveUp);
        let verdict = count_all(&[gave_up, gave_up, ballot(Vote::OutOfMemory), ballot(Vote::Ok)]);
        assert_eq!((verdict.fared, verdict.gave_up), ((Vote::OutOfMemory, Rank(2)), 2));
    }

    #[test]
    fn an_out_of_memory_outweighs_a_number_and_a_number_those_that_gave_up() {
        let verdict = count_all(&[ballot(Vote::NotFinite), ballot(Vote::OutOfMemory)]);
        assert_eq!(verdict.fared, (Vote::OutOfMemory, Rank(1)));
        let verdict = count_all(&[ballot(Vote::GaveUp), ballot(Vote::NotFinite), ballot(Vote::Ok)]);
        assert_eq!((verdict.fared, verdict.gave_up), ((Vote::NotFinite, Rank(1)), 1));
    }

    #[test]
    fn a_failure_outweighs_an_out_of_memory() {
        let verdict = count_all(&[ballot(Vote::OutOfMemory), ballot(Vote::Failed)]);
        assert_eq!(verdict.fared, (Vote::Failed, Rank(1)));
    }

    #[test]
    fn a_command_that_reached_one_rank_counts_for_all() {
        let mut second = ballot(Vote::Ok);
        second.commands = Commands {
            pause: true,
            checkpoints: 3,
            stop: false,
            memory_reports: 2,
            memory_reset: 1,
            regroup: true,
            hand_over: true,
        };
        let verdict = count_all(&[ballot(Vote::Ok), second]);
        assert_eq!(verdict.commands, second.commands);
        assert_eq!((verdict.loss_sum, verdict.valid_count), (3.0, 4.0));
    }

    #[test]
    fn a_rank_that_came_later_does_not_say_what_is_far() {
        let of = |spike_limit| Ballot { spike_limit, ..ballot(Vote::Ok) };
        assert_eq!(count_all(&[of((3, 9.0)), of((64, 2.0)), of((64, 2.5))]).spike_limit, (64, 2.0));
        assert_eq!(count_all(&[ballot(Vote::Ok)]).spike_limit, (0, f64::INFINITY));
    }

    #[test]
    fn the_first_rank_that_is_swapped_out_is_named() {
        let pressed = Ballot { pressed: true, ..ballot(Vote::Ok) };
        assert_eq!(count_all(&[ballot(Vote::Ok), pressed, pressed]).pressed, Some(Rank(1)));
        assert_eq!(count_all(&[ballot(Vote::Ok)]).pressed, None);
    }

    /// Layers of an attempt that only another rank's ballot ends.
    const ENDLESS: usize = usize::MAX;
    /// Longer than any ballot is on its way.
    const PATIENCE: Duration = Duration::from_secs(30);

    /// One attempt of a rank, and its vote. Returns the layers that it has run, and the verdict.
    fn attempt(comm: &mut dyn Collective, own: Vote, layers: usize) -> (usize, Verdict) {
        let (lookout, run, deadline) = (Lookout::for_ranks(comm), Cell::new(0), Instant::now() + PATIENCE);
        let work = || {
            for _ in 0..layers {
                memory::check();
                run.set(run.get() + 1);
                assert!(Instant::now() < deadline, "nobody's ballot has come");
                thread::yield_now();
            }
        };
        let fared = match memory::guarded_unless(move || lookout.sees_loss(), work) {
            Ok(()) => own,
            Err(GuardedError::CalledOff) => Vote::GaveUp,
            Err(GuardedError::OutOfMemory(overrun)) => panic!("nothing bounds this: {overrun:?}"),
        };
        (run.get(), cast(&ballot(fared), comm).expect("all ranks vote"))
    }

    /// What each of four ranks of a ring makes of `part`.
    fn on_four_ranks<R: Send>(shared_memory: bool, part: impl Fn(&mut dyn Collective) -> R + Sync) -> Vec<R> {
        thread::scope(|scope| {
            let part = &part;
            let ranks: Vec<_> = loopback_over(4, shared_memory)
                .into_iter()
                .map(|connect| scope.spawn(move || part(&mut connect())))
                .collect();
            ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
        })
    }

    #[test]
    fn ranks_give_up_when_one_is_out_of_memory_and_the_next_attempt_runs_to_its_end() {
        for shared_memory in [true, false] {
            let seen = on_four_ranks(shared_memory, |comm| {
                let lost = comm.rank() == Rank(2);
                let first = match lost {
                    true => attempt(comm, Vote::OutOfMemory, 3),
                    false => attempt(comm, Vote::Ok, ENDLESS),
                };
                (first, attempt(comm, Vote::Ok, 5))
            });
            for (rank, ((layers, verdict), (again, second))) in seen.into_iter().enumerate() {
                assert!(rank != 2 || layers == 3, "rank {rank}: {layers}");
                assert_eq!((verdict.fared, verdict.gave_up), ((Vote::OutOfMemory, Rank(2)), 3));
                assert_eq!((again, second.fared, second.gave_up), (5, (Vote::Ok, Rank(0)), 0), "rank {rank}");
            }
        }
    }

    #[test]
    fn ballots_of_ranks_that_are_well_end_nobodys_attempt() {
        let seen = on_four_ranks(true, |comm| {
            if comm.rank() != Rank(0) {
                return attempt(comm, Vote::Ok, 3);
            }
            // It begins when the others have voted.
            let ahead = comm.ahead(FIELDS * 4).expect("a ring shows what has come");
            let deadline = Instant::now() + PATIENCE;
            while ahead.shares().len() < 3 {
                assert!(Instant::now() < deadline, "{:?} is all that has come", ahead.shares());
                thread::yield_now();
            }
            attempt(comm, Vote::Ok, 50)
        });
        assert_eq!(seen.iter().map(|(layers, _)| *layers).collect::<Vec<_>>(), [50, 3, 3, 3]);
        assert!(seen.iter().all(|(_, verdict)| verdict.fared.0 == Vote::Ok && verdict.gave_up == 0));
    }

    #[test]
    fn a_world_of_one_sees_nobody() {
        assert!(!Lookout::for_ranks(&Solo::default()).sees_loss());
    }
}
