//! Which state a new generation goes on with: a pure decision that every rank takes alike from the same
//! table.
//!
//! Every rank says which parts of the flat parameter buffer it holds in which versions ([`Holding`]); one
//! that was disturbed while it took over a state holds parts of two partitions. A version can be gone on with
//! if every part of it is held by someone; the newest such version wins. Without one, the ranks start from
//! the newest checkpoint.

use coxswain_proto::ids::{Generation, Rank, Step};

use crate::zero::{Copy, ScaleState, Versions};

/// What one rank brings into a new generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    /// The generation whose partition its parts follow: the last one that it has got to run.
    pub generation: Generation,
    /// Ranks in that generation.
    pub world: u32,
    /// Rank there.
    pub rank: Rank,
    /// Versions of its own part.
    pub own: Versions,
    /// Versions of the part that it has a replica of; none without one.
    pub replica: Option<Versions>,
    /// How many ranks before it on the ring the rank is whose part that is: at least 1.
    pub distance: u32,
    /// Steps that were left out, in the newest version.
    pub skipped: u64,
    /// Whether the newest version differs from the one before it by such a step alone.
    pub left_out: bool,
    /// What the loss is multiplied by in the newest version, and in the one before; none if it is not scaled.
    pub loss_scale: Option<[ScaleState; 2]>,
}

impl Holding {
    /// The rank whose part its replica is of.
    fn replicated(&self) -> u32 {
        (self.rank.0 + self.world - self.distance % self.world) % self.world
    }

    /// Whether it has any part in this version.
    fn has(&self, version: u64) -> bool {
        self.own.contain(version) || self.replica.is_some_and(|replica| replica.contain(version))
    }

    /// Steps that were left out, in one of its versions.
    fn skipped_in(&self, version: u64) -> u64 {
        self.skipped - u64::from(self.left_out && version < self.own.newest)
    }

    /// What the loss is multiplied by, in one of its versions.
    fn loss_scale_in(&self, version: u64) -> Option<ScaleState> {
        self.loss_scale.map(|[newest, before]| if version < self.own.newest { before } else { newest })
    }

    /// How this rank has the part of `rank` in `version`, if it has it.
    fn copy_of(&self, rank: u32, version: u64) -> Option<Copy> {
        if self.rank.0 == rank && self.own.contain(version) {
            return Some(Copy::Own);
        }
        let replica = self.replica.filter(|versions| versions.contain(version));
        replica.filter(|_| self.replicated() == rank).map(|_| Copy::Replica)
    }
}

/// The rank that sends one part of the old partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// A rank of the new generation.
    pub from: Rank,
    /// Which of its parts.
    pub copy: Copy,
}

/// What a new generation goes on with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The generation whose partition the parts follow.
    pub generation: Generation,
    /// Steps done: the first step to run.
    pub version: u64,
    /// Steps left out among those done.
    pub skipped: u64,
    /// What the loss is multiplied by; none if it is not scaled.
    pub loss_scale: Option<ScaleState>,
    /// The ranks that send the parts of the old partition, in its rank order.
    pub sources: Vec<Source>,
}

impl Choice {
    /// Whether a lost rank's part comes from a replica.
    pub fn uses_replica(&self) -> bool {
        self.sources.iter().any(|source| source.copy == Copy::Replica)
    }
}

/// The newest version of which everything is there, given what ranks of the new generation hold.
///
/// Ranks may come from different generations: only holdings that follow one partition make up a state, and
/// the newest partition that does is the one the run went on with, even if latecomers hold a later version of
/// an older one. A version before `saved`, the newest checkpoint, is one that the run has left: all ranks of
/// some generation had taken these steps, so a rank that holds less was cut off before.
pub fn choose(holdings: &[(Rank, Holding)], saved: Step) -> Option<Choice> {
    let mut partitions: Vec<(Generation, u32)> =
        holdings.iter().map(|(_, held)| (held.generation, held.world)).collect();
    partitions.sort_unstable();
    partitions.dedup();
    let newest = |partition| newest_of(holdings, partition).filter(|choice| choice.version >= saved.0);
    partitions.into_iter().rev().find_map(newest)
}

fn newest_of(holdings: &[(Rank, Holding)], partition: (Generation, u32)) -> Option<Choice> {
    let of_partition = |(_, held): &&(Rank, Holding)| (held.generation, held.world) == partition;
    let members: Vec<_> = holdings.iter().filter(of_partition).collect();
    let newest = members.iter().map(|(_, held)| held.own.newest).max()?;
    [Some(newest), newest.checked_sub(1)].into_iter().flatten().find_map(|version| {
        let source = |part: u32| {
            let copies = members
                .iter()
                .filter_map(|(from, held)| Some(Source { from: *from, copy: held.copy_of(part, version)? }));
            copies.min_by_key(|source| (source.copy == Copy::Replica, source.from))
        };
        let sources: Vec<Source> = (0..partition.1).map(source).collect::<Option<_>>()?;
        let giver = sources.first()?.from;
        let (_, held) = members.iter().find(|(rank, held)| *rank == giver && held.has(version))?;
        let (skipped, loss_scale) = (held.skipped_in(version), held.loss_scale_in(version));
        Some(Choice { generation: partition.0, version, skipped, loss_scale, sources })
    })
}

#[cfg(test)]
mod tests {
    use coxswain_proto::replicas::Placement;
    use proptest::prelude::*;

    use super::*;

    fn held(rank: u32, world: u32, own: u64, replica: u64) -> Option<Holding> {
        let versions = |newest| Versions { newest, older: true };
        let replica = (world > 1).then(|| versions(replica));
        let (own, rank) = (versions(own), Rank(rank));
        Some(Holding {
            generation: Generation(3),
            world,
            rank,
            own,
            replica,
            distance: 1,
            skipped: 0,
            left_out: false,
            loss_scale: None,
        })
    }

    /// What is chosen where each rank holds this, or nothing.
    fn choose(holdings: &[Option<Holding>]) -> Option<Choice> {
        let all = (0..).zip(holdings).filter_map(|(rank, held)| Some((Rank(rank), (*held)?)));
        super::choose(&all.collect::<Vec<_>>(), Step(0))
    }

    /// A rank is lost in the last moment of taking over: one survivor knows that all have the new state and
    /// has let the old one go, the other does not know.
    #[test]
    fn a_rank_that_cannot_know_whether_all_have_the_new_state_brings_both() {
        let old = held(1, 3, 8, 8).unwrap();
        let new = |rank| Holding { generation: Generation(4), ..held(rank, 3, 8, 8).unwrap() };
        let [passed, disturbed] = [Rank(0), Rank(1)];
        assert_eq!(super::choose(&[(passed, new(0)), (disturbed, old)], Step(8)), None, "neither is whole");
        let all = [(passed, new(0)), (disturbed, old), (disturbed, new(1))];
        let choice = super::choose(&all, Step(8)).unwrap();
        assert_eq!((choice.generation, choice.version), (Generation(4), 8));
        assert_eq!(choice.sources[2], Source { from: passed, copy: Copy::Replica });
    }

    #[test]
    fn what_is_older_than_the_newest_checkpoint_is_not_gone_on_with() {
        let [first, second] = [0, 1].map(|rank| (Rank(rank), held(rank, 2, 8, 8).unwrap()));
        let version = |saved| super::choose(&[first, second], Step(saved)).map(|choice| choice.version);
        assert_eq!([version(0), version(8), version(9)], [Some(8), Some(8), None]);
        // A rank that was cut off in an older generation holds less than the checkpoint; of those that went
        // on all but one are lost.
        let alone = Holding { generation: Generation(4), ..held(1, 3, 20, 20).unwrap() };
        assert_eq!(super::choose(&[first, (Rank(1), alone)], Step(16)), None);
    }

    #[test]
    fn a_lost_ranks_part_comes_from_the_next_rank() {
        let choice = choose(&[held(0, 3, 8, 8), None, held(2, 3, 8, 8)]).unwrap();
        assert_eq!(choice.version, 8);
        let from = |from, copy| Source { from: Rank(from), copy };
        assert_eq!(choice.sources, [from(0, Copy::Own), from(2, Copy::Replica), from(2, Copy::Own)]);
        assert!(choice.uses_replica());
    }

    #[test]
    fn ranks_that_are_a_step_ahead_go_back_if_a_part_is_behind() {
        let choice = choose(&[held(0, 3, 9, 9), held(1, 3, 9, 8), held(2, 3, 8, 8)]).unwrap();
        assert_eq!((choice.version, choice.uses_replica()), (9, true), "part 2 is on rank 0, a step ahead");
        let choice = choose(&[held(0, 3, 9, 8), held(1, 3, 9, 8), held(2, 3, 8, 8)]).unwrap();
        assert_eq!(choice.version, 8);
    }

    #[test]
    fn the_loss_scale_is_that_of_the_version_that_is_chosen() {
        let [newest, before] = [15, 16].map(|exponent| ScaleState { exponent, good: 0 });
        let loss_scale = Some([newest, before]);
        let left_out =
            |rank| Some(Holding { skipped: 1, left_out: true, loss_scale, ..held(rank, 3, 9, 9).unwrap() });
        let unaware = |rank| {
            let only = Versions { newest: 8, older: false };
            let loss_scale = Some([before; 2]);
            Some(Holding { own: only, replica: Some(only), loss_scale, ..held(rank, 3, 8, 8).unwrap() })
        };
        let chosen = |holdings: &[Option<Holding>]| {
            let choice = choose(holdings).unwrap();
            (choice.version, choice.loss_scale)
        };
        assert_eq!(chosen(&[left_out(0), left_out(1), left_out(2)]), (9, Some(newest)));
        assert_eq!(chosen(&[left_out(0), left_out(1), unaware(2)]), (9, Some(newest)));
        assert_eq!(chosen(&[unaware(0), left_out(1), unaware(2)]), (8, Some(before)));
    }

    /// A step was left out, and one rank was cut off before it heard so.
    #[test]
    fn steps_that_were_left_out_are_counted_as_of_the_version_that_is_chosen() {
        let left_out = |rank| Some(Holding { skipped: 4, left_out: true, ..held(rank, 3, 9, 9).unwrap() });
        let unaware = |rank| {
            let only = Versions { newest: 8, older: false };
            Some(Holding { own: only, replica: Some(only), skipped: 3, ..held(rank, 3, 8, 8).unwrap() })
        };
        let chosen = |holdings: &[Option<Holding>]| {
            let choice = choose(holdings).unwrap();
            (choice.version, choice.skipped)
        };
        assert_eq!(chosen(&[left_out(0), left_out(1), left_out(2)]), (9, 4));
        assert_eq!(chosen(&[left_out(0), left_out(1), unaware(2)]), (9, 4), "rank 0 has the part of rank 2");
        assert_eq!(
            chosen(&[unaware(0), left_out(1), unaware(2)]),
            (8, 3),
            "nobody else has the part of rank 2"
        );
    }

    #[test]
    fn neighbours_lost_together_need_the_checkpoint() {
        assert_eq!(choose(&[held(0, 4, 8, 8), None, None, held(3, 4, 8, 8)]), None);
        assert_eq!(choose(&[None, None]), None);
    }

    #[test]
    fn a_holding_names_whose_part_its_replica_is_of() {
        // Two nodes of two ranks, of which the second is lost, and a newcomer in its place.
        let far = |rank| Some(Holding { distance: 2, ..held(rank, 4, 8, 8).unwrap() });
        let choice = choose(&[far(0), far(1), None]).unwrap();
        let from = |from, copy| Source { from: Rank(from), copy };
        let own = [from(0, Copy::Own), from(1, Copy::Own)];
        assert_eq!(choice.sources, [own, [from(0, Copy::Replica), from(1, Copy::Replica)]].concat());
        // Of a generation in which all were on one node, the same ranks have too little.
        assert_eq!(choose(&[held(0, 4, 8, 8), held(1, 4, 8, 8), None]), None);
    }

    #[test]
    fn holdings_of_different_partitions_are_not_mixed() {
        let old = held(0, 2, 8, 8);
        let new = Some(Holding { generation: Generation(4), world: 3, ..held(1, 3, 9, 9).unwrap() });
        let choice = choose(&[old, new]).unwrap();
        assert_eq!(
            (choice.version, choice.sources.len()),
            (8, 2),
            "rank 0 alone has both parts of its partition"
        );
    }

    /// What the ranks of a generation hold whose replicas are at this distance, each so far in a step, and
    /// the version that all of them have: stages are 0 nothing yet, 1 shifted, 2 updated, 3 gathered. A rank
    /// that has gathered proves that all have updated.
    fn in_a_step(distance: u32, step: u64, stages: &[u8]) -> Vec<Option<Holding>> {
        let world = stages.len() as u32;
        let gathered = stages.contains(&3);
        let stage = |rank: u32| stages[rank as usize].max(if gathered { 2 } else { 0 });
        // A gradient has arrived only if all ranks on its way have got to the shift.
        let logged = |rank: u32| (0..=distance).all(|back| stage((rank + world - back) % world) >= 1);
        let held = |rank: u32| {
            let own = Versions { newest: step + u64::from(stage(rank) >= 2), older: stage(rank) >= 2 };
            let replica = Versions { newest: step + u64::from(logged(rank)), older: logged(rank) };
            Some(Holding { own, replica: Some(replica), distance, ..held(rank, world, 0, 0)? })
        };
        (0..world).map(held).collect()
    }

    proptest! {
        /// Whichever rank dies, and at whatever moment of a step, the others hold a version no older than
        /// what all had finished.
        #[test]
        fn one_lost_rank_loses_no_finished_step(
            lost in 0usize..7, distance in 0u32..7, step in 1u64..50,
            stages in prop::collection::vec(0u8..4, 2..7),
        ) {
            let world = stages.len();
            let (lost, distance) = (lost % world, 1 + distance % (world as u32 - 1));
            let mut holdings = in_a_step(distance, step, &stages);
            let survivor_gathered = (0..world).any(|rank| rank != lost && stages[rank] == 3);
            holdings[lost] = None;
            let choice = choose(&holdings).expect("one lost rank is no loss");
            prop_assert!(choice.version >= step + u64::from(survivor_gathered));
        }

        /// Whichever node dies, the others hold a version no older than what all had finished, if no node has
        /// more ranks than all others together; otherwise, if any but that node dies.
        #[test]
        fn a_lost_node_loses_no_finished_step(
            sizes in prop::collection::vec(1usize..4, 2..5), lost in 0u32..5, step in 1u64..50,
            stages in prop::collection::vec(0u8..4, 16), rotation in 0usize..16,
        ) {
            let mut nodes: Vec<u32> = (0..).zip(&sizes).flat_map(|(node, size)| vec![node; *size]).collect();
            let (world, lost) = (nodes.len(), lost % sizes.len() as u32);
            nodes.rotate_left(rotation % world);
            let Placement { distance, at_home } = Placement::of(&nodes);
            let largest = sizes.iter().max().expect("there are nodes");
            prop_assert_eq!(at_home > 0, 2 * largest > world);
            let mut holdings = in_a_step(distance, step, &stages[..world]);
            let gone = |rank: &usize| nodes[*rank] == lost;
            let survivor_gathered = (0..world).any(|rank| !gone(&rank) && stages[rank] == 3);
            (0..world).filter(gone).for_each(|rank| holdings[rank] = None);
            if 2 * sizes[lost as usize] > world {
                // Its own replicas are lost with it.
                prop_assert_eq!(choose(&holdings), None);
            } else {
                let choice = choose(&holdings).expect("its replicas are elsewhere");
                prop_assert!(choice.version >= step + u64::from(survivor_gathered));
            }
        }
    }
}
