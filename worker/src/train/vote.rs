//! The vote that makes a step a transaction.
//!
//! After its micro-batches, and before any gradient moves, every rank tells all others in one small all-gather how it fared, what
//! it was asked to do, and its share of the loss. Every rank reads the same ballots in the same order, so all come to the
//! same verdict without another message: commit, shrink and retry, or end; and commands take effect at the same boundary everywhere.

use coxswain_proto::ids::Rank;

use crate::{
    collective::{Buf, BufMut, Collective, CollectiveError},
    link::Commands,
};

/// How a rank's micro-batches ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fared {
    /// Gradients are summed up and finite as far as this rank can tell.
    Ok,
    /// Memory ran out; the same samples may fit in smaller micro-batches.
    OutOfMemory,
    /// Bad data, a non-finite loss, a broken file: a retry would fail again.
    Failed,
}

/// What one rank says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ballot {
    /// How its micro-batches ended.
    pub fared: Fared,
    /// What its session was asked for so far.
    pub commands: Commands,
    /// Sum of losses over its valid elements.
    pub loss_sum: f64,
    /// Its valid elements.
    pub valid_count: f64,
    /// Whether its system swaps it out, step after step: the next step should take less.
    pub pressed: bool,
}

/// What all ranks decide, the same on each.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// The worst that befell any rank, and the first rank it befell.
    pub fared: (Fared, Rank),
    /// The union of all ranks' commands.
    pub commands: Commands,
    /// Sum of losses over all ranks.
    pub loss_sum: f64,
    /// Valid elements over all ranks.
    pub valid_count: f64,
    /// The first rank that is swapped out.
    pub pressed: Option<Rank>,
}

const FIELDS: usize = 9;

impl Ballot {
    fn encode(&self) -> [f64; FIELDS] {
        let fared = match self.fared {
            Fared::Ok => 0.0,
            Fared::OutOfMemory => 1.0,
            Fared::Failed => 2.0,
        };
        let commands = self.commands;
        [
            fared,
            f64::from(u8::from(commands.pause)),
            f64::from(u8::from(commands.stop)),
            f64::from(commands.checkpoints),
            f64::from(commands.memory_reports),
            self.loss_sum,
            self.valid_count,
            f64::from(u8::from(commands.regroup) + u8::from(commands.hand_over)),
            f64::from(u8::from(self.pressed)),
        ]
    }
}

/// Casts this rank's ballot and returns what all decided.
pub fn cast(ballot: &Ballot, comm: &mut dyn Collective) -> Result<Verdict, CollectiveError> {
    let mut ballots = vec![0.0; FIELDS * comm.world()];
    comm.all_gather(Buf::F64(&ballot.encode()), BufMut::F64(&mut ballots))?;
    Ok(count(&ballots))
}

fn count(ballots: &[f64]) -> Verdict {
    let mut verdict = Verdict {
        fared: (Fared::Ok, Rank(0)),
        commands: Commands::default(),
        loss_sum: 0.0,
        valid_count: 0.0,
        pressed: None,
    };
    let mut worst = 0.0;
    for (rank, ballot) in ballots.chunks_exact(FIELDS).enumerate() {
        if ballot[0] > worst {
            worst = ballot[0];
            let fared = if worst == 1.0 { Fared::OutOfMemory } else { Fared::Failed };
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
        if ballot[8] != 0.0 {
            verdict.pressed = verdict.pressed.or(Some(Rank(rank as u32)));
        }
    }
    verdict
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ballot(fared: Fared) -> Ballot {
        Ballot { fared, commands: Commands::default(), loss_sum: 1.5, valid_count: 2.0, pressed: false }
    }

    fn count_all(ballots: &[Ballot]) -> Verdict {
        count(&ballots.iter().flat_map(Ballot::encode).collect::<Vec<_>>())
    }

    #[test]
    fn one_rank_out_of_memory_is_every_ranks_business() {
        let verdict = count_all(&[ballot(Fared::Ok), ballot(Fared::OutOfMemory), ballot(Fared::Ok)]);
        assert_eq!(verdict.fared, (Fared::OutOfMemory, Rank(1)));
    }

    #[test]
    fn a_failure_outweighs_an_out_of_memory() {
        let verdict = count_all(&[ballot(Fared::OutOfMemory), ballot(Fared::Failed)]);
        assert_eq!(verdict.fared, (Fared::Failed, Rank(1)));
    }

    #[test]
    fn a_command_that_reached_one_rank_counts_for_all() {
        let mut second = ballot(Fared::Ok);
        second.commands = Commands {
            pause: true,
            checkpoints: 3,
            stop: false,
            memory_reports: 1,
            regroup: true,
            hand_over: true,
        };
        let verdict = count_all(&[ballot(Fared::Ok), second]);
        assert_eq!(verdict.commands, second.commands);
        assert_eq!((verdict.loss_sum, verdict.valid_count), (3.0, 4.0));
    }

    #[test]
    fn the_first_rank_that_is_swapped_out_is_named() {
        let pressed = Ballot { pressed: true, ..ballot(Fared::Ok) };
        assert_eq!(count_all(&[ballot(Fared::Ok), pressed, pressed]).pressed, Some(Rank(1)));
        assert_eq!(count_all(&[ballot(Fared::Ok)]).pressed, None);
    }
}
