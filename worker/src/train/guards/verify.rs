//! Ranks compare what they hold, every `faults.verify_every` steps and before every checkpoint.
//!
//! After a step's vote, and before any gradient moves, all ranks have the same weights, and every part of the
//! optimizer's state is on its owner and in its replica on another rank, bit for bit. Memory, a
//! device or a link that is not sound can make one of these copies another one without any error. So ranks
//! gather digests of all of them, and each comes to the same finding:
//!
//! ```text
//! sound      all agree
//! wrong      some ranks differ, and it is known which: by the majority, or where there is none by the third
//!            copy, which is the replica. They forget what they hold, and all form another generation, in
//!            which they get it anew, as successors of lost ranks do
//! unclear    owner and replica differ, and all ranks compute with the owner's weights: it was wrong before
//!            they were gathered, or the replica is. All forget, and go back to the last checkpoint, which
//!            was compared before it was written
//! ```
//!
//! Weights that are wrong for one step only, between two comparisons and in a part that another rank owns,
//! leave no trace in any copy but in that step's gradient: `faults.verify_every: 1` looks at every step.
//!
//! What this does not do: look at frozen weights and at data, or find a rank whose arithmetic is wrong while
//! its memory is sound.

use coxswain_nn::kernels::Tape;
use coxswain_proto::{
    ids::{Rank, Step},
    run_spec::RunSpec,
};

use super::finding::Comparison;
use crate::train::{Facts, Learner, Members, TrainError};
use crate::{
    collective::{Buf, BufMut, Computes},
    link::{Phase, Report},
    memory::Meter,
    zero::{Digests, PartDigests},
};

/// Whether ranks compare in this step.
pub(in crate::train) fn is_due(spec: &RunSpec, step: Step) -> bool {
    let every = spec.faults.verify_every;
    every > 0 && step.0 > 0 && step.0.is_multiple_of(every)
}

/// All ranks: compares, between two steps. An error ends the generation; what is wrong is not brought into
/// the next.
pub(in crate::train) fn compare<B: Tape<Base = B>>(
    step: Step,
    run: &Facts<'_, B>,
    members: &mut Members,
    learner: &mut Learner<B>,
    meter: &mut Meter,
) -> Result<(), TrainError> {
    let world = members.comm.world();
    if world < 2 || run.spec.faults.verify_every == 0 {
        return Ok(());
    }
    members.enter(meter, Phase::Communication, step)?;
    let weights: B::Flat = learner.trainables.take();
    let digests = learner.optimizer().digests(&weights);
    learner.trainables.put(weights);
    let row = encode(&digests, members.computes);
    let mut table = vec![0.0; FIELDS * world];
    members.comm.all_gather(Buf::F64(&row), BufMut::F64(&mut table))?;
    let finding = judge(&decode(&table), members.assignment.replica_distance as usize);
    let own = members.rank();
    let certain = matches!(finding, Comparison::Wrong(_));
    let (suspect, line) = match &finding {
        Comparison::Sound => return Ok(()),
        Comparison::Wrong(ranks) => (
            ranks.contains(&own),
            "this rank's weights differ from those of the other ranks; it receives theirs".to_owned(),
        ),
        Comparison::Unclear(owner, holder) => (
            own == *owner,
            format!(
                "this rank's optimizer shard differs from the replica on rank {holder}, and it is \
                 unknown which is right: all ranks go back to the last checkpoint"
            ),
        ),
    };
    if suspect {
        let line = format!("step {step}: {line}. If this happens again, check this rank's memory and device");
        let told = if certain { Report::HardwareFault(line) } else { Report::Note(line) };
        members.link.report(told)?;
    }
    if suspect || matches!(finding, Comparison::Unclear(..)) {
        learner.distrust();
    }
    Err(TrainError::Differ { step, finding })
}

/// Numbers of a row: five digests in halves, for whole numbers travel unchanged up to 2^53, whether there is
/// a replica, and what the rank computes on.
const FIELDS: usize = 14;

fn encode(digests: &Digests, computes: Computes) -> [f64; FIELDS] {
    let Digests { weights, own, replicated, replica } = digests;
    let kept = replica.unwrap_or(PartDigests { weights: 0, state: 0 });
    let values = [*weights, own.weights, own.state, *replicated, kept.weights, kept.state];
    let mut row = [0.0; FIELDS];
    for (fields, value) in row.chunks_exact_mut(2).zip(values) {
        (fields[0], fields[1]) = (f64::from(value as u32), f64::from((value >> 32) as u32));
    }
    row[12] = f64::from(u8::from(replica.is_some()));
    row[13] = f64::from(u8::from(computes == Computes::OnGpu));
    row
}

/// What ranks say of themselves. Where some compute on CPUs and others on GPUs, a replica may differ from its
/// owner in the last bit of a root, and is not compared.
fn decode(table: &[f64]) -> Vec<Digests> {
    let rows = || table.chunks_exact(FIELDS);
    let mixed = rows().any(|row| row[13] != table[13]);
    let of_row = |row: &[f64]| {
        let value = |at: usize| u64::from(row[2 * at] as u32) | u64::from(row[2 * at + 1] as u32) << 32;
        let part = |at: usize| PartDigests { weights: value(at), state: value(at + 1) };
        let replica = (row[12] != 0.0 && !mixed).then(|| part(4));
        Digests { weights: value(0), own: part(1), replicated: value(3), replica }
    };
    rows().map(of_row).collect()
}

/// What follows from what all ranks hold, in rank order; each has the replica of the rank `distance` before
/// it.
fn judge(ranks: &[Digests], distance: usize) -> Comparison {
    let world = ranks.len();
    let holder = |owner: usize| (owner + distance) % world;
    // Pairs of an owner and the holder of its replica.
    let pairs = || (0..world).filter_map(|owner| Some((owner, holder(owner), ranks[holder(owner)].replica?)));
    let differing = || pairs().filter(|(owner, _, replica)| ranks[*owner].own != *replica);
    let unclear = |owner: usize| Comparison::Unclear(Rank(owner as u32), Rank(holder(owner) as u32));
    let agree = |with: &Digests| ranks.iter().filter(|other| other.weights == with.weights).count();
    if agree(&ranks[0]) == world {
        return differing().next().map_or(Comparison::Sound, |(owner, ..)| unclear(owner));
    }
    let majority = ranks.iter().find(|rank| 2 * agree(rank) > world);
    let mut wrong: Vec<usize> = match majority {
        Some(majority) => (0..world).filter(|rank| ranks[*rank].weights != majority.weights).collect(),
        // Of three copies of a part, on the owner, in the replica, and with the holder, two agree.
        None => pairs()
            .filter_map(|(owner, holder, replica)| {
                let owners = ranks[owner].own.weights == replica.weights;
                let holders = ranks[holder].replicated == replica.weights;
                match (owners, holders) {
                    (false, true) => Some(owner),
                    (true, false) => Some(holder),
                    _ => None,
                }
            })
            .collect(),
    };
    wrong.sort_unstable();
    wrong.dedup();
    // A wrong owner's part comes from the replica, which has to be what its holder computes with.
    let doubtful = pairs().find(|(owner, holder, replica)| {
        let explained = wrong.contains(owner) || wrong.contains(holder);
        let replaced = wrong.contains(owner) && !wrong.contains(holder);
        (!explained && ranks[*owner].own != *replica)
            || (replaced && ranks[*holder].replicated != replica.weights)
    });
    match doubtful {
        Some((owner, ..)) => unclear(owner),
        None if wrong.is_empty() || wrong.len() == world => unclear(0),
        None => Comparison::Wrong(wrong.into_iter().map(|rank| Rank(rank as u32)).collect()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Numbers that stand for contents: part `p` of the right weights is `p`, of the right state `100 + p`.
    #[derive(Clone)]
    struct World {
        /// What each rank computes with, part by part.
        weights: Vec<Vec<u64>>,
        own_state: Vec<u64>,
        /// By holder.
        replicas: Option<Vec<PartDigests>>,
        distance: usize,
    }

    impl World {
        fn sound(world: u64, distance: u64, replicated: bool) -> Self {
            let part = |of: u64| PartDigests { weights: of, state: 100 + of };
            Self {
                weights: vec![(0..world).collect(); world as usize],
                own_state: (100..100 + world).collect(),
                replicas: replicated
                    .then(|| (0..world).map(|rank| part((rank + world - distance) % world)).collect()),
                distance: distance as usize,
            }
        }

        fn judge(&self) -> Comparison {
            let world = self.weights.len();
            let of_rank = |rank: usize| {
                let weights = self.weights[rank].iter().fold(7, |sum: u64, part| sum.wrapping_mul(31) + part);
                let own = PartDigests { weights: self.weights[rank][rank], state: self.own_state[rank] };
                let replica = self.replicas.as_ref().map(|replicas| replicas[rank]);
                let replicated = self.weights[rank][(rank + world - self.distance) % world];
                encode(&Digests { weights, own, replicated, replica }, Computes::OnCpu)
            };
            judge(&decode(&(0..world).flat_map(of_rank).collect::<Vec<_>>()), self.distance)
        }
    }

    const FLIPPED: u64 = 1 << 40;

    /// Sizes, and how far replicas are from their owners.
    fn worlds() -> impl Strategy<Value = (u64, u64)> {
        (2u64..7).prop_flat_map(|world| (Just(world), 1..world))
    }

    #[test]
    fn ranks_that_agree_are_sound() {
        for (world, distance) in (2..6).flat_map(|world| (1..world).map(move |by| (world, by))) {
            assert_eq!(World::sound(world, distance, true).judge(), Comparison::Sound);
            assert_eq!(World::sound(world, distance, false).judge(), Comparison::Sound);
        }
    }

    proptest! {
        /// Whichever rank's weights are wrong, in whichever part: with a replica two ranks suffice.
        #[test]
        fn a_rank_with_wrong_weights_is_named(
            (world, distance) in worlds(), rank in 0u64..7, part in 0u64..7,
        ) {
            let (rank, part) = ((rank % world) as usize, (part % world) as usize);
            for replicated in [true, false] {
                let mut ranks = World::sound(world, distance, replicated);
                ranks.weights[rank][part] ^= FLIPPED;
                if !replicated && world == 2 {
                    prop_assert!(matches!(ranks.judge(), Comparison::Unclear(..)));
                } else {
                    prop_assert_eq!(ranks.judge(), Comparison::Wrong(vec![Rank(rank as u32)]));
                }
            }
        }

        /// Gathered since, an owner's wrong weights are everybody's.
        #[test]
        fn weights_that_were_wrong_before_they_were_gathered_are_found_and_not_blamed(
            (world, distance) in worlds(), owner in 0u64..7,
        ) {
            let owner = (owner % world) as usize;
            let mut ranks = World::sound(world, distance, true);
            ranks.weights.iter_mut().for_each(|weights| weights[owner] ^= FLIPPED);
            let holder = (owner + distance as usize) % world as usize;
            prop_assert_eq!(ranks.judge(), Comparison::Unclear(Rank(owner as u32), Rank(holder as u32)));
        }

        /// Moments are there twice.
        #[test]
        fn state_or_a_replica_that_is_wrong_is_found(
            (world, distance) in worlds(), owner in 0u64..7, what in 0u8..3,
        ) {
            let owner = (owner % world) as usize;
            let holder = (owner + distance as usize) % world as usize;
            let mut ranks = World::sound(world, distance, true);
            let replica = &mut ranks.replicas.as_mut().expect("there are some")[holder];
            match what {
                0 => ranks.own_state[owner] ^= FLIPPED,
                1 => replica.state ^= FLIPPED,
                _ => replica.weights ^= FLIPPED,
            }
            prop_assert_eq!(ranks.judge(), Comparison::Unclear(Rank(owner as u32), Rank(holder as u32)));
        }
    }

    #[test]
    fn a_wrong_rank_whose_replica_is_wrong_too_has_nobody_to_get_its_part_from() {
        let mut ranks = World::sound(4, 1, true);
        ranks.weights[1][1] ^= FLIPPED;
        ranks.replicas.as_mut().expect("there are some")[2].weights ^= FLIPPED << 1;
        assert_eq!(ranks.judge(), Comparison::Unclear(Rank(1), Rank(2)));
    }

    #[test]
    fn a_replica_on_another_kind_of_device_is_not_compared() {
        let digests = |replica: u64| Digests {
            weights: 1,
            own: PartDigests { weights: 2, state: 3 },
            replicated: 2,
            replica: Some(PartDigests { weights: 2, state: replica }),
        };
        let rows = |second| [encode(&digests(3), Computes::OnCpu), encode(&digests(9), second)].concat();
        assert_eq!(judge(&decode(&rows(Computes::OnGpu)), 1), Comparison::Sound);
        assert_ne!(judge(&decode(&rows(Computes::OnCpu)), 1), Comparison::Sound);
    }

    #[test]
    fn digests_travel_whole() {
        let part = PartDigests { weights: u64::MAX, state: 1 << 63 };
        let digests = Digests { weights: u64::MAX - 1, own: part, replicated: 1 << 32, replica: Some(part) };
        let bare = Digests { replica: None, ..digests };
        let table = [encode(&digests, Computes::OnCpu), encode(&bare, Computes::OnCpu)].concat();
        assert_eq!(decode(&table), [digests, bare]);
    }
}
