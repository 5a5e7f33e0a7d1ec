//! Where the replicas of optimizer shards lie: so far along the ring that a node takes no shard with it.
//!
//! The replica of rank `r`'s shard is with rank `(r + distance) mod world`, and the distance is the same for
//! all ranks of a generation:
//!
//! ```text
//! rank   0 1 2 3 4 5 6 7     distance 4: if node a is lost, the shards 0..4 are with ranks 4..8
//! node   a a a a b b b b
//!
//! rank   0 1 2 3 4 5         distance 2: most ranks are on node a, so that two replicas have to stay there
//! node   a a a a b b
//! ```

/// Where a generation keeps its replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// From a rank to the one that has the replica of its shard, along the ring: 1 up to the world less one
    /// (1 in a world of one, where there is none).
    pub distance: u32,
    /// Ranks whose replica is on their own node, and lost with it.
    pub at_home: u32,
}

impl Placement {
    /// The placement of ranks on these nodes, by rank: the shortest way with the fewest replicas at home.
    pub fn of(nodes: &[u32]) -> Self {
        let world = nodes.len();
        let along = |distance: usize| {
            let at_home = (0..world).filter(|rank| nodes[*rank] == nodes[(rank + distance) % world]).count();
            Self { distance: distance as u32, at_home: at_home as u32 }
        };
        let mut best = along(1);
        // The other way round the ring as many stay at home. Ranks lie node by node, so that none does from
        // the size of the largest node on: a large world is not searched to the end.
        for distance in 2..=world / 2 {
            if best.at_home == 0 {
                break;
            }
            let next = along(distance);
            best = if next.at_home < best.at_home { next } else { best };
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Ranks that lie node by node, of nodes of these sizes.
    fn of_sizes(sizes: &[usize]) -> Placement {
        Placement::of(&(0..).zip(sizes).flat_map(|(node, size)| vec![node; *size]).collect::<Vec<_>>())
    }

    #[test]
    fn a_replica_is_as_near_as_may_be() {
        for (sizes, distance, at_home) in [
            (&[1][..], 1, 1),
            (&[4], 1, 4),
            (&[1, 1, 1, 1], 1, 0),
            (&[4, 4], 4, 0),
            (&[8, 8, 8], 8, 0),
            (&[4, 2], 2, 2),
            (&[2, 4], 2, 2),
            (&[3, 1, 2], 3, 0),
            (&[7, 8, 8, 8], 8, 0),
        ] {
            assert_eq!(of_sizes(sizes), Placement { distance, at_home }, "{sizes:?}");
        }
        assert_eq!(Placement::of(&[]).at_home, 0);
    }

    #[test]
    fn the_largest_world_is_placed_at_once() {
        let nodes: Vec<u32> = (0..crate::limits::MAX_WORLD as u32).map(|rank| rank / 8).collect();
        assert_eq!(Placement::of(&nodes), Placement { distance: 8, at_home: 0 });
    }

    proptest! {
        #[test]
        fn every_shard_has_one_replica_and_no_other_distance_is_better(
            nodes in prop::collection::vec(0u32..4, 2..14), rotation in 0usize..14,
        ) {
            let world = nodes.len();
            let Placement { distance, at_home } = Placement::of(&nodes);
            let mut holders: Vec<_> = (0..world).map(|rank| (rank + distance as usize) % world).collect();
            let stay = |distance: usize| {
                (0..world).filter(|rank| nodes[*rank] == nodes[(rank + distance) % world]).count()
            };
            prop_assert_eq!(stay(distance as usize), at_home as usize);
            for other in 1..world {
                prop_assert!(stay(other) >= at_home as usize, "{other}");
                prop_assert!(stay(other) > at_home as usize || other >= distance as usize, "{other} is nearer");
            }
            holders.sort_unstable();
            prop_assert!(holders.into_iter().eq(0..world), "a rank has two replicas, and another none");
            // Which rank is the first does not matter.
            let mut rotated = nodes;
            rotated.rotate_left(rotation % world);
            prop_assert_eq!(Placement::of(&rotated), Placement { distance, at_home });
        }
    }
}
