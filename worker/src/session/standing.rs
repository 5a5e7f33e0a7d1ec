//! What a worker has been told, and what follows from it for its trainer: the worker's state machine, without
//! threads, clocks or network. The session feeds it directives, the trainer's end of the link asks it; a
//! simulation does both.
//!
//! Directives are levels, not edges: a replay after a lost connection changes nothing. Everything about a
//! generation that is older than the newest one known is ignored, so a coordinator that lags behind cannot
//! call a worker back.

use std::ops::Range;

use coxswain_proto::ids::{Generation, Rank, Step};

use crate::link::{Assignment, CachePhase, Commands, LinkError};

/// The right to run a slice of the batches of some steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// In which generation.
    pub generation: Generation,
    /// Steps in which it is valid.
    pub steps: Range<u64>,
    /// Which slice.
    pub slice: Rank,
    /// How many slices there are.
    pub slices: u32,
    /// Where all of the steps take their features from.
    pub cache_phase: CachePhase,
}

/// One thing a worker is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A place in a generation.
    Assign(Assignment),
    /// Steps that may be run.
    Grant(Lease),
    /// Wait at the next boundary.
    Pause,
    /// Go on.
    Resume,
    /// Checkpoints asked for so far.
    Checkpoints(u32),
    /// Memory reports asked for so far.
    MemoryReports {
        /// How many.
        count: u32,
        /// The number of the last one after which peaks are to begin anew; 0: none.
        reset: u32,
    },
    /// Finish.
    Stop,
    /// A generation is over.
    Abort(Generation, String),
    /// The run is over.
    Over(String),
    /// A generation is to be left at the next boundary.
    Regroup {
        /// Which.
        generation: Generation,
        /// After a checkpoint.
        checkpoint: bool,
    },
    /// This worker is not needed any more.
    Dismiss(String),
}

/// Where a worker stands.
#[derive(Clone, Debug, Default)]
pub struct Standing {
    /// The newest place given.
    assignment: Option<Assignment>,
    /// The generation of the place that the trainer has taken.
    entered: Generation,
    /// The newest generation known to be over, and why.
    over: (Generation, String),
    /// The newest generation that is to be left, and whether after a checkpoint.
    regroup: (Generation, bool),
    leases: Vec<Lease>,
    commands: Commands,
    /// Set once, for good.
    cut: Option<LinkError>,
}

impl Standing {
    /// Takes a directive in. True if a collective of the trainer's may have to end for it.
    pub fn told(&mut self, told: Notice) -> bool {
        match told {
            Notice::Assign(assignment) => return self.assign(assignment),
            Notice::Grant(lease) => self.grant(lease),
            Notice::Pause => self.commands.pause = true,
            Notice::Resume => self.commands.pause = false,
            Notice::Checkpoints(count) => self.commands.checkpoints = self.commands.checkpoints.max(count),
            Notice::MemoryReports { count, reset } => {
                self.commands.memory_reports = self.commands.memory_reports.max(count);
                self.commands.memory_reset = self.commands.memory_reset.max(reset);
            }
            Notice::Stop => self.commands.stop = true,
            Notice::Regroup { generation, checkpoint } => {
                self.regroup = self.regroup.max((generation, checkpoint));
            }
            // Between generations it is waiting; within one, a place was given before the word.
            Notice::Dismiss(reason) => self.cut(LinkError::Dismissed(reason)),
            Notice::Over(reason) => {
                self.cut(LinkError::Over(reason));
                return true;
            }
            Notice::Abort(generation, reason) => return self.end(generation, reason),
        }
        false
    }

    fn end(&mut self, generation: Generation, reason: String) -> bool {
        let is_news = generation > self.over.0;
        if is_news {
            self.over = (generation, reason);
        }
        is_news && generation >= self.entered
    }

    /// A place in a generation says, too, that the one before it is over: a coordinator that died meanwhile
    /// may have taken this worker for one that was in none.
    fn assign(&mut self, assignment: Assignment) -> bool {
        let generation = assignment.generation;
        if self.assignment.as_ref().is_some_and(|old| old.generation >= generation) {
            return false;
        }
        self.leases.retain(|lease| lease.generation >= generation);
        self.assignment = Some(assignment);
        let is_in_another = Generation(0) < self.entered && self.entered < generation;
        is_in_another && self.end(self.entered, format!("generation {generation} has begun"))
    }

    fn grant(&mut self, lease: Lease) {
        if lease.generation >= self.entered {
            self.leases.retain(|old| old.steps != lease.steps || old.generation != lease.generation);
            self.leases.push(lease);
        }
    }

    /// The line is cut for good.
    pub fn cut(&mut self, why: LinkError) {
        self.cut.get_or_insert(why);
    }

    /// The place to take next, once there is one; the trainer has taken it with this.
    pub fn enter(&mut self) -> Option<Result<Assignment, LinkError>> {
        if let Some(cut) = &self.cut {
            return Some(Err(cut.clone()));
        }
        let assignment =
            self.assignment.as_ref().filter(|assignment| assignment.generation > self.entered)?;
        self.entered = assignment.generation;
        Some(Ok(assignment.clone()))
    }

    /// Whether a place in a generation newer than `left` has been given.
    pub fn has_place_after(&self, left: Generation) -> bool {
        self.assignment.as_ref().is_some_and(|assignment| assignment.generation > left)
    }

    /// An error once the trainer's generation, or everything, is over.
    pub fn alive(&self) -> Result<(), LinkError> {
        match &self.cut {
            Some(cut) => Err(cut.clone()),
            None if self.over.0 >= self.entered && self.entered > Generation(0) => {
                Err(LinkError::Aborted(self.over.1.clone()))
            }
            None => Ok(()),
        }
    }

    /// The lease of a step, once there is one. Leases of older steps are forgotten.
    pub fn lease(&mut self, step: Step) -> Option<Result<Lease, LinkError>> {
        if let Err(over) = self.alive() {
            return Some(Err(over));
        }
        let entered = self.entered;
        self.leases.retain(|lease| lease.generation > entered || lease.steps.end > step.0);
        // Steps are granted again with the line, and then the newest word counts: it may know more of the
        // step's cache phase.
        let mut newest_first = self.leases.iter().rev();
        let found = newest_first.find(|lease| lease.generation == entered && lease.steps.contains(&step.0));
        found.map(|lease| Ok(lease.clone()))
    }

    /// Whether a trainer that was paused may go on.
    pub fn unpaused(&self) -> Option<Result<(), LinkError>> {
        if let Err(over) = self.alive() {
            return Some(Err(over));
        }
        if self.commands().regroup {
            return Some(Err(LinkError::Aborted("the world changes while the run is paused".into())));
        }
        (!self.commands.pause || self.commands.stop).then_some(Ok(()))
    }

    /// What people want, now.
    pub fn commands(&self) -> Commands {
        let (generation, checkpoint) = self.regroup;
        let regroup = generation == self.entered && generation > Generation(0);
        Commands { regroup, hand_over: regroup && checkpoint, ..self.commands }
    }

    /// The generation that the trainer is in, or was last.
    pub fn generation(&self) -> Generation {
        self.entered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assignment(generation: u64) -> Assignment {
        Assignment {
            generation: Generation(generation),
            rank: Rank(0),
            world: 2,
            next: "b".into(),
            quarantined: Vec::new(),
            checkpoint_step: Step(0),
            closing: false,
            replica_distance: 1,
        }
    }

    fn lease(generation: u64, steps: Range<u64>) -> Notice {
        Notice::Grant(Lease {
            generation: Generation(generation),
            steps,
            slice: Rank(0),
            slices: 2,
            cache_phase: CachePhase::LIVE,
        })
    }

    fn entered(generation: u64) -> Standing {
        let mut standing = Standing::default();
        standing.told(Notice::Assign(assignment(generation)));
        assert_eq!(standing.enter(), Some(Ok(assignment(generation))));
        standing
    }

    #[test]
    fn a_place_is_taken_once_and_a_replay_of_it_is_none() {
        let mut standing = entered(1);
        standing.told(Notice::Assign(assignment(1)));
        assert_eq!(standing.enter(), None);
        standing.told(Notice::Assign(assignment(2)));
        standing.told(Notice::Assign(assignment(1)));
        assert_eq!(standing.enter(), Some(Ok(assignment(2))));
    }

    #[test]
    fn an_aborted_generation_lets_nothing_pass_until_the_next_is_entered() {
        let mut standing = entered(1);
        standing.told(lease(1, 0..32));
        assert!(standing.told(Notice::Abort(Generation(1), "rank 1 is gone".into())));
        let over = Err(LinkError::Aborted("rank 1 is gone".into()));
        assert_eq!(standing.alive(), over);
        assert!(matches!(standing.lease(Step(3)), Some(Err(_))));
        standing.told(Notice::Assign(assignment(2)));
        assert!(standing.alive().is_err(), "told of a place is not in it");
        standing.enter();
        assert_eq!(standing.alive(), Ok(()));
        assert_eq!(standing.lease(Step(3)), None, "leases are of their generation");
        assert!(!standing.told(Notice::Abort(Generation(1), "again".into())), "a stale abort is ignored");
        assert_eq!(standing.alive(), Ok(()));
    }

    #[test]
    fn a_place_in_a_later_generation_ends_the_one_before_it() {
        let mut standing = entered(1);
        assert!(standing.told(Notice::Assign(assignment(2))));
        assert!(matches!(standing.alive(), Err(LinkError::Aborted(_))));
        standing.enter();
        assert_eq!(standing.alive(), Ok(()));
        assert!(!Standing::default().told(Notice::Assign(assignment(2))), "it was in none");
    }

    #[test]
    fn a_lease_that_comes_before_its_place_is_kept() {
        let mut standing = entered(1);
        standing.told(lease(2, 7..39));
        standing.told(Notice::Assign(assignment(2)));
        standing.enter();
        assert!(matches!(standing.lease(Step(7)), Some(Ok(_))));
        assert_eq!(standing.lease(Step(39)), None);
    }

    #[test]
    fn regroup_concerns_its_generation_alone() {
        let mut standing = entered(1);
        standing.told(Notice::Regroup { generation: Generation(1), checkpoint: false });
        assert!(standing.commands().regroup);
        standing.told(Notice::Pause);
        assert!(matches!(standing.unpaused(), Some(Err(LinkError::Aborted(_)))));
        standing.told(Notice::Assign(assignment(2)));
        standing.enter();
        assert!(!standing.commands().regroup);
        assert_eq!(standing.unpaused(), None);
        standing.told(Notice::Resume);
        assert_eq!(standing.unpaused(), Some(Ok(())));
    }

    #[test]
    fn what_is_cut_stays_cut() {
        let mut standing = entered(1);
        standing.cut(LinkError::Over("the run has failed".into()));
        standing.cut(LinkError::Lost("later".into()));
        standing.told(Notice::Assign(assignment(2)));
        assert_eq!(standing.enter(), Some(Err(LinkError::Over("the run has failed".into()))));
    }
}
