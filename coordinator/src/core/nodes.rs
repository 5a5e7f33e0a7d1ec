//! Launchers: their places in the world, and their lines.
//!
//! A place belongs to a launcher process. When its line has been closed for too long and none of its workers
//! lives, the node counts as gone, and another launcher may take the place; at once, if none of those workers
//! is connected, where it comes from the same machine, on which the old one must have died, or a new launch
//! claims the place of an earlier one. Until then the place is kept, and a launcher that wants it is told to
//! ask again. A launcher that is only stopped or cut off leaves workers behind that heartbeat: nothing is the
//! matter with them; when it dies, they die with it.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use super::{
    event::{NodeClaim, StreamId},
    line::Line,
    past::PastNode,
    refusal::Refusal,
    time::Timestamp,
};
use crate::options::World;

/// All nodes of a run, by place.
#[derive(Clone, Debug)]
pub struct Nodes {
    world: World,
    /// Launchers of an earlier life of the coordinator are those of an earlier launch: most likely none of
    /// its processes lives.
    new_launch: bool,
    nodes: BTreeMap<u32, Node>,
    /// Places, by launcher.
    places: HashMap<String, u32>,
}

/// One launcher.
#[derive(Clone, Debug)]
pub struct Node {
    /// Stable over retries of one launcher.
    pub node_id: String,
    /// Machine.
    pub host: String,
    /// Line.
    pub line: Line,
    /// It has been missed for too long, and its workers are gone.
    pub gone: bool,
    /// It is of an earlier life of the coordinator, and has not been heard of in this one.
    pub recalled: bool,
}

/// What became of a claim to a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodePlacement {
    /// It had the place already.
    Again(u32),
    /// It had the place until it was given up, and no other launcher has taken it since.
    Back(u32),
    /// The place was free.
    New(u32),
    /// The place was a dead launcher's.
    Instead(u32),
}

impl NodePlacement {
    /// The place.
    pub fn node_rank(self) -> u32 {
        match self {
            Self::Again(place) | Self::Back(place) | Self::New(place) | Self::Instead(place) => place,
        }
    }
}

impl Node {
    /// When it counts as gone unless its line is opened: again, or at all.
    fn gone_at(&self) -> Option<Timestamp> {
        self.line.missed_at().filter(|_| !self.gone)
    }

    /// It was there and is not now; its place will be free unless it comes back.
    fn is_missed(&self) -> bool {
        self.line.opened > 0 && self.line.stream.is_none() && !self.gone
    }
}

impl Nodes {
    /// No launcher is there yet. `new_launch`: the launchers that are recalled belong to an earlier launch.
    pub fn new(world: World, new_launch: bool) -> Self {
        Self { world, new_launch, nodes: BTreeMap::new(), places: HashMap::new() }
    }

    /// Enters a node of an earlier life of the coordinator; it is missed after `reopen_within`.
    pub fn recall(&mut self, now: Timestamp, place: u32, past: PastNode, reopen_within: Duration) {
        let PastNode { node_id, host, .. } = past;
        let line = Line::opened_before(now, reopen_within);
        self.put(place, Node { node_id, host, line, gone: false, recalled: true });
    }

    /// Puts a node at its place; the one that had it.
    fn put(&mut self, place: u32, node: Node) -> Option<Node> {
        self.places.insert(node.node_id.clone(), place);
        let before = self.nodes.insert(place, node);
        let other = before.as_ref().filter(|before| self.nodes[&place].node_id != before.node_id);
        if let Some(before) = other {
            self.places.remove(&before.node_id);
        }
        before
    }

    /// Gives a node its place. `connected`: whether a worker at a place is.
    pub fn place(
        &mut self,
        now: Timestamp,
        claim: &NodeClaim,
        patience: Duration,
        connected: impl Fn(u32) -> bool,
    ) -> Result<NodePlacement, Refusal> {
        let World { max_nodes: nnodes, nproc_per_node, .. } = self.world;
        if claim.local_world != nproc_per_node {
            return Err(Refusal::LocalWorld { theirs: claim.local_world, ours: nproc_per_node });
        }
        if let Ok((place, node)) = self.find(&claim.node_id) {
            if std::mem::take(&mut node.gone) {
                node.line.close(now, patience);
                return Ok(NodePlacement::Back(place));
            }
            return Ok(NodePlacement::Again(place));
        }
        let place = match claim.node_rank {
            Some(node_rank) if node_rank >= nnodes => {
                return Err(Refusal::NodeRankOutside { node_rank, nnodes });
            }
            Some(node_rank) => match self.nodes.get(&node_rank) {
                Some(node) if self.gives_way(node, claim, connected(node_rank)) => node_rank,
                Some(node) if node.is_missed() => {
                    return Err(Refusal::PlaceKept { node_rank, host: node.host.clone() });
                }
                Some(node) => return Err(Refusal::NodeRankTaken { node_rank, host: node.host.clone() }),
                None => node_rank,
            },
            None => self.free_place(claim, connected)?,
        };
        let node = Node {
            node_id: claim.node_id.clone(),
            host: claim.host.clone(),
            line: Line::closed(now, patience),
            gone: false,
            recalled: false,
        };
        Ok(match self.put(place, node) {
            Some(_) => NodePlacement::Instead(place),
            None => NodePlacement::New(place),
        })
    }

    /// Whether a claim gets a node's place. A launcher that names a place of an earlier launch, or wants the
    /// only one there is, replaces the one that had it; a launcher that takes any of several might displace
    /// one that is about to come back.
    fn gives_way(&self, node: &Node, claim: &NodeClaim, connected: bool) -> bool {
        let certain = claim.node_rank.is_some() || self.world.max_nodes == 1;
        let replaced = self.new_launch && node.recalled && certain;
        node.gone || (node.is_missed() && !connected && (node.host == claim.host || replaced))
    }

    /// A free place, or else one that was a dead launcher's.
    fn free_place(&self, claim: &NodeClaim, connected: impl Fn(u32) -> bool) -> Result<u32, Refusal> {
        let nnodes = self.world.max_nodes;
        let gap = (0..).zip(self.nodes.keys()).find(|(place, taken)| place != *taken);
        let unused = Some(gap.map_or(self.nodes.len() as u32, |(place, _)| place)).filter(|it| *it < nnodes);
        let gives_way = |(place, node): &(&u32, &Node)| self.gives_way(node, claim, connected(**place));
        let left = || self.nodes.iter().find(gives_way).map(|(place, _)| *place);
        unused.or_else(left).ok_or_else(|| match self.nodes.iter().find(|(_, node)| node.is_missed()) {
            Some((place, node)) => Refusal::PlaceKept { node_rank: *place, host: node.host.clone() },
            None => Refusal::NodesComplete { nnodes },
        })
    }

    /// The place of a node that has joined.
    pub fn find(&mut self, node_id: &str) -> Result<(u32, &mut Node), Refusal> {
        let place = self.places.get(node_id).copied();
        let found = place.and_then(|place| Some((place, self.nodes.get_mut(&place)?)));
        found.ok_or_else(|| Refusal::UnknownNode(node_id.to_owned()))
    }

    /// The node at a place.
    pub fn at(&self, place: u32) -> Option<&Node> {
        self.nodes.get(&place)
    }

    /// The machine of the node at a place; empty if the place is free.
    pub fn host(&self, place: u32) -> &str {
        self.at(place).map_or("", |node| &node.host)
    }

    /// The open line of the node at a place.
    pub fn line(&self, place: u32) -> Option<StreamId> {
        self.nodes.get(&place)?.line.stream
    }

    /// Places of nodes that are not gone.
    pub fn living(&self) -> impl Iterator<Item = u32> {
        self.nodes.iter().filter(|(_, node)| !node.gone).map(|(place, _)| *place)
    }

    /// A line was closed; when its node counts as gone, if the line was its newest.
    pub fn line_closed(
        &mut self,
        now: Timestamp,
        node_id: &str,
        line: StreamId,
        within: Duration,
    ) -> Option<Timestamp> {
        let (_, node) = self.find(node_id).ok().filter(|(_, node)| node.line.stream == Some(line))?;
        node.line.close(now, within);
        node.gone_at()
    }

    /// When the node at a place counts as gone, should none of its processes live then.
    pub fn gone_at(&self, place: u32) -> Option<Timestamp> {
        self.nodes.get(&place)?.gone_at()
    }

    /// Marks the first node that counts as gone now; its place. `lives`: whether a worker at this place does.
    pub fn lose_one(&mut self, now: Timestamp, lives: impl Fn(u32) -> bool) -> Option<u32> {
        let missed = |node: &Node| node.gone_at().is_some_and(|at| at <= now);
        let (place, node) = self.nodes.iter_mut().find(|(place, node)| missed(node) && !lives(**place))?;
        node.gone = true;
        Some(*place)
    }

    /// The earliest moment at which a node without living workers could count as gone.
    pub fn next_loss(&self, lives: impl Fn(u32) -> bool) -> Option<Timestamp> {
        let deserted = self.nodes.iter().filter(|(_, node)| node.line.stream.is_none());
        deserted.filter(|(place, _)| !lives(**place)).filter_map(|(_, node)| node.gone_at()).min()
    }
}
