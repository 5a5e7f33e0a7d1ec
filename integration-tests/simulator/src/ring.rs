//! The collectives of one generation. One is finished when every member has entered it; who is told when is
//! up to the network.

use std::collections::{BTreeMap, BTreeSet};

use coxswain_proto::ids::{Rank, Step};
use coxswain_worker::train::recovery::{Choice, Holding, choose};

/// The ring of one generation.
#[derive(Clone, Debug)]
pub struct Ring {
    /// Processes by rank.
    pub members: Vec<usize>,
    /// Members that have entered each collective.
    entered: BTreeMap<u64, usize>,
    /// What members brought in.
    pub holdings: Vec<(Rank, Holding)>,
    /// A member has left, or a connection is broken: nothing is finished any more.
    pub broken: bool,
    /// Members that have asked, in the vote of a step, to leave before it.
    pub regroup: Option<Step>,
    /// What all members choose alike from the holdings, once one has.
    choice: Option<Option<Choice>>,
    /// The newest checkpoint that any member has taken part in.
    pub saved: u64,
    /// The newest checkpoint on disk, once one has looked.
    found: Option<Step>,
}

impl Ring {
    /// Nobody has entered anything.
    pub fn new(members: Vec<usize>) -> Self {
        Self {
            members,
            entered: BTreeMap::new(),
            holdings: Vec::new(),
            broken: false,
            regroup: None,
            choice: None,
            saved: 0,
            found: None,
        }
    }

    /// The newest checkpoint, which the coordinator may not know: as all members agree.
    pub fn newest_checkpoint(&mut self, told: Step, disk: &BTreeSet<u64>) -> Step {
        let found = || disk.last().copied().map_or(told, Step);
        told.max(*self.found.get_or_insert_with(found))
    }

    /// The state to go on with; nothing if no version is complete, or none that is as new as the newest
    /// checkpoint.
    pub fn choice(&mut self, checkpoint: Step) -> Option<&Choice> {
        let holdings = &self.holdings;
        // Linear in parts times ranks, and the same for every rank: taken once.
        self.choice.get_or_insert_with(|| choose(holdings, checkpoint)).as_ref()
    }

    /// A member enters a collective; true when it is finished by this.
    pub fn enter(&mut self, collective: u64) -> bool {
        let entered = self.entered.entry(collective).or_insert(0);
        *entered += 1;
        let finished = *entered == self.members.len() && !self.broken;
        if finished {
            self.entered.remove(&collective);
        }
        finished
    }
}
