//! Parts over real sockets: what comes, what does not, and that no rank waits for another one's pass.

use std::{
    io::{ErrorKind, Read},
    net::{IpAddr, Ipv4Addr, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use coxswain_identity::{Scope, Token, Tokens};
use coxswain_nn::sharded::{Cut, Fetch, HeldParts, PartBytes, Peers};

use super::*;
use crate::collective::ring::loopback;

const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const RUN: [u8; 32] = [7; 32];

/// Every block's part is so many bytes of `rank * 16 + block`.
struct Parts {
    digest: [u8; 32],
    cut: Mutex<Option<Cut>>,
    len: usize,
    asked: AtomicUsize,
}

impl Parts {
    fn new(cut: Cut, len: usize) -> Arc<Self> {
        let (cut, asked) = (Mutex::new(Some(cut)), AtomicUsize::new(0));
        Arc::new(Self { digest: [1; 32], cut, len, asked })
    }
}

fn byte(rank: usize, block: usize) -> u8 {
    (rank * 16 + block) as u8
}

impl HeldParts for Parts {
    fn digest(&self) -> [u8; 32] {
        self.digest
    }

    fn part(&self, block: usize, cut: Cut) -> Option<PartBytes> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let held = *self.cut.lock().expect("no thread panics with it");
        (held == Some(cut)).then(|| Arc::new(vec![byte(cut.rank, block); self.len]) as PartBytes)
    }
}

fn served(parts: &Arc<Parts>, tokens: Option<Tokens>) -> PartServer {
    PartServer::start(LOCAL, RUN, Arc::clone(parts) as _, tokens).expect("a port is free")
}

fn caller(cut: Cut) -> Caller {
    Caller { run: RUN, blocks: [1; 32], cut, tokens: None }
}

/// Asks for a block; what came of each rank.
fn fetch(peers: &RemotePeers, cut: Cut, block: usize, len: usize) -> Vec<(usize, bool, Vec<u8>)> {
    let others: Vec<_> = (0..cut.world).filter(|rank| *rank != cut.rank).collect();
    let mut buffers: Vec<_> = others.iter().map(|_| vec![0; len]).collect();
    let mut wanted: Vec<_> =
        others.iter().zip(&mut buffers).map(|(&rank, buffer)| asked(rank, buffer)).collect();
    peers.fetch(block, &mut wanted, &|| true);
    let came: Vec<_> = wanted.into_iter().map(|wanted| (wanted.rank, wanted.came)).collect();
    came.into_iter().zip(buffers).map(|((rank, came), buffer)| (rank, came, buffer)).collect()
}

/// A part that lies in two places.
fn asked(rank: usize, buffer: &mut [u8]) -> Fetch<'_> {
    let (first, second) = buffer.split_at_mut(buffer.len() / 3);
    Fetch { rank, places: vec![first, second], came: false }
}

fn cut(rank: usize, world: usize) -> Cut {
    Cut { rank, world }
}

#[test]
fn every_rank_is_answered_by_all_others_however_often_each_asks() {
    // Longer than what sockets keep for themselves.
    const LEN: usize = 3 << 20;
    let parts: Vec<_> = (0..4).map(|rank| Parts::new(cut(rank, 4), LEN)).collect();
    let servers: Vec<_> = parts.iter().map(|parts| served(parts, None)).collect();
    let addresses: Vec<_> = servers.iter().map(|server| Some(server.address())).collect();
    thread::scope(|scope| {
        for rank in 0..4 {
            let peers = RemotePeers::new(caller(cut(rank, 4)), addresses.clone());
            scope.spawn(move || {
                // Rank 0 asks for nothing at all, rank 3 for six blocks, each in an order of its own.
                for block in (0..2 * rank).rev() {
                    for (from, came, bytes) in fetch(&peers, cut(rank, 4), block, LEN) {
                        assert!(
                            came && bytes.iter().all(|found| *found == byte(from, block)),
                            "{rank} {from}"
                        );
                    }
                }
            });
        }
    });
    assert_eq!(parts.iter().map(|parts| parts.asked.load(Ordering::Relaxed)).sum::<usize>(), 3 * 12);
}

#[test]
fn a_rank_that_is_gone_or_holds_another_cut_is_left_out_and_no_error() {
    let parts: Vec<_> = (0..3).map(|rank| Parts::new(cut(rank, 3), 64)).collect();
    let mut servers: Vec<_> = parts.iter().map(|parts| Some(served(parts, None))).collect();
    let addresses: Vec<_> = servers.iter().flatten().map(|server| Some(server.address())).collect();
    let peers = RemotePeers::new(caller(cut(0, 3)), addresses);
    let came = |block| -> Vec<bool> {
        fetch(&peers, cut(0, 3), block, 64).into_iter().map(|(_, came, _)| came).collect()
    };
    assert_eq!(came(0), [true, true]);
    *parts[1].cut.lock().expect("no thread panics with it") = None;
    assert_eq!(came(1), [false, true]);
    *parts[1].cut.lock().expect("no thread panics with it") = Some(cut(1, 3));
    assert_eq!(came(2), [true, true], "it is asked again on the same connection");
    servers[2] = None;
    assert_eq!(came(3), [true, false]);
    let before = parts[1].asked.load(Ordering::Relaxed);
    assert_eq!(came(4), [true, false], "it is left alone");
    assert_eq!(parts[1].asked.load(Ordering::Relaxed), before + 1);
}

#[test]
fn an_answer_that_is_not_waited_for_is_no_answer_to_the_next_question() {
    let parts: Vec<_> = (0..3).map(|rank| Parts::new(cut(rank, 3), 4 << 20)).collect();
    let servers: Vec<_> = parts.iter().map(|parts| served(parts, None)).collect();
    let addresses = servers.iter().map(|server| Some(server.address())).collect();
    let peers = RemotePeers::new(caller(cut(0, 3)), addresses);
    let mut buffers = [vec![0; 4 << 20], vec![0; 4 << 20]];
    let mut wanted: Vec<_> =
        [1, 2].into_iter().zip(&mut buffers).map(|(rank, buffer)| asked(rank, buffer)).collect();
    peers.fetch(0, &mut wanted, &|| false);
    assert!(wanted.iter().all(|wanted| !wanted.came));
    for (from, came, bytes) in fetch(&peers, cut(0, 3), 5, 4 << 20) {
        assert!(came && bytes.iter().all(|found| *found == byte(from, 5)), "{from}");
    }
}

#[test]
fn strangers_other_runs_and_other_models_are_refused() {
    let parts = Parts::new(cut(1, 2), 64);
    let token = Tokens::one(Token::fresh(Scope::Worker).expect("randomness"));
    let server = served(&parts, Some(token.clone()));
    let came = |caller: Caller| {
        let peers = RemotePeers::new(caller, vec![None, Some(server.address())]);
        fetch(&peers, cut(0, 2), 0, 64)[0].1
    };
    let ours = Caller { tokens: Some(token), ..caller(cut(0, 2)) };
    assert!(came(ours.clone()));
    assert!(!came(caller(cut(0, 2))), "without the token");
    let other = Tokens::one(Token::fresh(Scope::All).expect("randomness"));
    assert!(!came(Caller { tokens: Some(other), ..ours }), "another token");
    assert!(!came(Caller { run: [8; 32], ..ours.clone() }), "another run");
    assert!(!came(Caller { blocks: [8; 32], ..ours.clone() }), "another model");
    assert_eq!(parts.asked.load(Ordering::Relaxed), 1);
    // A part of another length than the caller expects is none.
    let peers = RemotePeers::new(ours, vec![None, Some(server.address())]);
    assert!(!fetch(&peers, cut(0, 2), 0, 60)[0].1);
}

#[test]
fn strangers_that_say_nothing_make_room_for_ranks_that_come_and_leave_those_that_are_there() {
    let parts = Parts::new(cut(1, 2), 64);
    let server = served(&parts, None);
    let peers = || RemotePeers::new(caller(cut(0, 2)), vec![None, Some(server.address())]);
    let first = peers();
    assert!(fetch(&first, cut(0, 2), 0, 64)[0].1);
    let connect = || TcpStream::connect(server.address()).expect("it listens");
    let mut silent: Vec<_> = (0..2 * server::STRANGERS).map(|_| connect()).collect();
    assert!(fetch(&peers(), cut(0, 2), 1, 64)[0].1, "a rank that comes");
    assert!(fetch(&first, cut(0, 2), 2, 64)[0].1, "one that is there");
    // Sooner than their patience ends, which all have alike.
    let last = silent.pop().expect("there are some");
    for mut stranger in silent.drain(..=server::STRANGERS) {
        let ended = stranger.read(&mut [0]);
        assert!(
            matches!(ended, Ok(0)) || ended.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset)
        );
    }
    last.set_nonblocking(true).expect("a socket");
    let quiet = (&last).read(&mut [0]).expect_err("it says nothing");
    assert_eq!(quiet.kind(), ErrorKind::WouldBlock, "the last one is still heard");
}

#[test]
fn ranks_tell_each_other_their_addresses() {
    let own = |rank: usize| (rank != 1).then(|| SocketAddr::new(LOCAL, 4000 + rank as u16));
    let ranks: Vec<_> = loopback(3)
        .into_iter()
        .enumerate()
        .map(|(rank, join)| {
            thread::spawn(move || exchange(&mut join(), own(rank)).expect("the ring is sound"))
        })
        .collect();
    let all: Vec<_> = ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect();
    assert!(all.iter().all(|found| *found == (0..3).map(own).collect::<Vec<_>>()), "{all:?}");
    let six: SocketAddr = "[2001:db8::7]:65535".parse().expect("an address");
    assert_eq!(decoded(&encoded(six)), Some(six));
    for port in [0.0, -1.0, 0.5, 65536.0, f64::NAN] {
        assert_eq!(decoded(&[0.0, 0.0, 0.0, 0.0, port]), None);
    }
}
