//! How rings form, and how they do not. What they compute is tested by `collective::conformance`.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use coxswain_identity::{Scope, Token, Tokens};
use coxswain_proto::ids::{Generation, Rank};

use super::{
    ahead::lock,
    handshake::{Admission, Hello, OPENING, encode_answer},
    *,
};
use crate::collective::proof::{NONCE, PROOF, RingKey, Role, Transcript};
use crate::collective::{AbortHandle, BufMut, Collective, CollectiveError, JoinError, Reduce};

/// Recipes for the ranks of a ring on the loopback interface.
pub(crate) fn loopback(world: usize) -> Vec<impl FnOnce() -> Ring + Send + 'static> {
    loopback_over(world, true)
}

/// Recipes for the ranks of a ring on the loopback interface, with or without shared memory.
pub(crate) fn loopback_over(
    world: usize,
    shared_memory: bool,
) -> Vec<impl FnOnce() -> Ring + Send + 'static> {
    let listeners: Vec<_> = (0..world).map(|_| listener().with_shared_memory(shared_memory)).collect();
    let peers: Arc<Vec<String>> = Arc::new(listeners.iter().map(|l| l.address().to_owned()).collect());
    listeners
        .into_iter()
        .enumerate()
        .map(|(rank, listener)| {
            let peers = peers.clone();
            move || connect(&listener, "run", 1, rank, &peers).expect("a loopback ring forms")
        })
        .collect()
}

fn listener() -> RingListener {
    RingListener::bind("127.0.0.1:0").expect("loopback has free ports")
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

fn connect(
    listener: &RingListener,
    run: &str,
    generation: u64,
    rank: usize,
    peers: &[String],
) -> Result<Ring, CollectiveError> {
    let rank = Rank(rank as u32);
    let membership = Membership::among(run, Generation(generation), rank, peers);
    Ring::connect(listener, &membership, soon(), &RingAbort::new())
}

fn addresses(listeners: &[&RingListener]) -> Vec<String> {
    listeners.iter().map(|l| l.address().to_owned()).collect()
}

#[test]
fn shared_memory_is_used_where_both_sides_allow_it() {
    for allowed in [[true, true], [true, false], [false, false]] {
        let [a, b] = allowed.map(|allowed| listener().with_shared_memory(allowed));
        let peers = addresses(&[&a, &b]);
        let shared = |ring: &Ring| {
            ring.lanes.as_ref().map(|(next, previous)| [next.is_shared(), lock(previous).is_shared()])
        };
        thread::scope(|scope| {
            let other = scope.spawn(|| connect(&b, "run", 1, 1, &peers).map(|ring| shared(&ring)));
            let ring = connect(&a, "run", 1, 0, &peers).expect("rank 0 joins");
            let both = allowed == [true, true];
            assert_eq!(shared(&ring), Some([both; 2]));
            assert_eq!(other.join().expect("no panic").expect("rank 1 joins"), Some([both; 2]));
        });
    }
}

#[test]
fn strangers_are_refused_and_do_not_hold_up_the_ring() {
    let (a, b) = (listener(), listener());
    let peers = addresses(&[&a, &b]);
    // One says nothing, one speaks another language, one hangs up.
    let silent = TcpStream::connect(a.address()).expect("connect");
    let mut talker = TcpStream::connect(a.address()).expect("connect");
    talker.write_all(&[b'G'; 200]).expect("write");
    drop(TcpStream::connect(a.address()).expect("connect"));
    thread::scope(|scope| {
        let other = scope.spawn(|| connect(&b, "run", 1, 1, &peers).expect("rank 1 joins").barrier());
        connect(&a, "run", 1, 0, &peers).expect("rank 0 joins").barrier().expect("the ring works");
        other.join().expect("no panic").expect("the ring works");
    });
    drop(silent);
}

/// A listener of a rank that has this token.
fn listener_with(token: &Token) -> RingListener {
    listener().with_tokens(Some(Tokens::one(token.clone())))
}

fn fresh(scope: Scope) -> Token {
    Token::fresh(scope).expect("randomness")
}

#[test]
fn ranks_that_share_a_token_form_a_ring_and_who_has_another_is_told_nothing() {
    let (ours, theirs) = (fresh(Scope::Worker), fresh(Scope::Worker));
    let (a, b) = (listener_with(&ours), listener_with(&ours));
    let peers = addresses(&[&a, &b]);
    let stranger = RingKey::to_call(Some(&Tokens::one(theirs)));
    let known = RingKey::to_call(Some(&Tokens::one(ours)));
    let hello = Hello::new("run", Generation(1), 1, 0, 2);
    // One of another run, with another token; and one who has read on the way which token it is about.
    let mut other = TcpStream::connect(a.address()).expect("connect");
    other.write_all(&hello.first_bytes(stranger.name, [1; NONCE])).expect("write");
    let mut eavesdropper = TcpStream::connect(a.address()).expect("connect");
    eavesdropper.write_all(&hello.first_bytes(known.name, [1; NONCE])).expect("write");
    eavesdropper.write_all(&[0; PROOF]).expect("write");
    thread::scope(|scope| {
        let rank_1 = scope.spawn(|| connect(&b, "run", 1, 1, &peers).expect("rank 1 joins").barrier());
        connect(&a, "run", 1, 0, &peers).expect("rank 0 joins").barrier().expect("the ring works");
        rank_1.join().expect("no panic").expect("the ring works");
    });
    let mut heard = Vec::new();
    // The end may be a reset: what it had sent was not read.
    let _ = other.read_to_end(&mut heard);
    assert_eq!(heard, [0u8; 0], "not a byte");
    let _ = eavesdropper.read_to_end(&mut heard);
    assert!(heard.len() <= NONCE, "a nonce, and no verdict: {heard:?}");
}

#[test]
fn a_rank_does_not_join_who_cannot_prove_the_token() {
    let (ours, theirs) = (fresh(Scope::All), fresh(Scope::All));
    let a = listener_with(&ours);
    // It lets anybody in, and would say so to a rank of the same run.
    let impostor = TcpListener::bind("127.0.0.1:0").expect("bind");
    let peers = vec![a.address().to_owned(), impostor.local_addr().expect("address").to_string()];
    let membership = Membership::among("run", Generation(1), Rank(0), &peers);
    thread::scope(|scope| {
        scope.spawn(move || {
            let (mut socket, _) = impostor.accept().expect("it is called");
            let (mut opening, challenge) = ([0; OPENING], [3; NONCE]);
            socket.read_exact(&mut opening).expect("it introduces itself");
            socket.write_all(&challenge).expect("write");
            socket.read_exact(&mut [0; PROOF]).expect("it proves who it is");
            let answer = encode_answer(Admission::Welcome, Generation(1));
            let heard = Transcript { opening: &opening, challenge: &challenge, answer: &answer };
            let proof = RingKey::to_call(Some(&Tokens::one(theirs))).prove(Role::Called, &heard);
            socket.write_all(&[&answer[..], &proof[..]].concat()).expect("write");
            // Were it believed, the rank would confirm; it hangs up.
            assert_eq!(socket.read(&mut [0; 4]).unwrap_or(0), 0);
        });
        let deadline = Instant::now() + Duration::from_millis(300);
        let error = Ring::connect(&a, &membership, deadline, &RingAbort::new()).expect_err("no rank there");
        assert!(error.to_string().contains("rank 1"), "{error}");
    });
}

#[test]
fn a_ring_forms_while_the_file_of_tokens_is_changed() {
    let dir = tempfile::tempdir().expect("a directory");
    let [old, new] = [0, 1].map(|_| fresh(Scope::Worker));
    let tokens = |name: &str, lines: &[&Token]| {
        let path = dir.path().join(name);
        lines.iter().for_each(|token| Tokens::add_to_file(&path, token).expect("a file"));
        Tokens::of_file(&path).expect("a file of tokens")
    };
    // One machine sees the file as it was, the other one as it is.
    let a = listener().with_tokens(Some(tokens("a", &[&old, &new])));
    let b = listener().with_tokens(Some(tokens("b", &[&new, &old])));
    let peers = addresses(&[&a, &b]);
    thread::scope(|scope| {
        let rank_1 = scope.spawn(|| connect(&b, "run", 1, 1, &peers).expect("rank 1 joins").barrier());
        connect(&a, "run", 1, 0, &peers).expect("rank 0 joins").barrier().expect("the ring works");
        rank_1.join().expect("no panic").expect("the ring works");
    });
}

#[test]
fn a_stale_generation_is_refused_and_the_current_one_forms() {
    let (a, b, stale) = (listener(), listener(), listener());
    let peers = addresses(&[&a, &b]);
    let stale_peers = addresses(&[&a, &stale]);
    thread::scope(|scope| {
        let late = scope.spawn(|| connect(&stale, "run", 6, 1, &stale_peers));
        let zero = scope.spawn(|| {
            let mut ring = connect(&a, "run", 7, 0, &peers).expect("rank 0 joins");
            ring.barrier().expect("the ring works");
        });
        let error = late.join().expect("no panic").expect_err("generation 6 is over");
        let text = error.to_string();
        assert!(text.contains("newer generation") && text.contains("generation 7"), "{text}");
        connect(&b, "run", 7, 1, &peers).expect("rank 1 joins").barrier().expect("the ring works");
        zero.join().expect("no panic");
    });
}

#[test]
fn a_rank_ahead_of_its_neighbour_waits_for_it_to_catch_up() {
    let (a, b) = (listener(), listener());
    let peers = addresses(&[&a, &b]);
    let (abort, (ready, is_ready)) = (RingAbort::new(), mpsc::channel());
    thread::scope(|scope| {
        let behind = scope.spawn(|| {
            let membership = Membership::among("run", Generation(1), Rank(0), &peers);
            let first = Ring::connect(&a, &membership, soon(), &abort).map(drop);
            ready.send(()).expect("the test listens");
            // If it has reached the other one before the abort, it was told that it is behind.
            let over = matches!(
                first,
                Err(CollectiveError::Aborted { .. } | CollectiveError::Connect(JoinError::Refused { .. }))
            );
            assert!(over, "{first:?}");
            connect(&a, "run", 2, 0, &peers).expect("rank 0 joins").barrier()
        });
        let ahead = scope.spawn(|| connect(&b, "run", 2, 1, &peers).expect("rank 1 joins").barrier());
        abort.abort("generation 2 began");
        is_ready.recv().expect("rank 0 went on");
        behind.join().expect("no panic").expect("the ring works");
        ahead.join().expect("no panic").expect("the ring works");
    });
}

#[test]
fn another_run_on_the_same_port_is_named_as_such() {
    let (a, b) = (listener(), listener());
    let peers = addresses(&[&a, &b]);
    thread::scope(|scope| {
        let abort = RingAbort::new();
        let theirs = Membership::among("theirs", Generation(1), Rank(0), &peers);
        let (listener, handle) = (&a, abort.clone());
        // Refused itself, it gives up; the one that called it meanwhile is answered when it listens again.
        scope.spawn(move || {
            while handle.reason().is_none() {
                Ring::connect(listener, &theirs, soon(), &handle).map(drop).expect_err("another run");
            }
        });
        let error = connect(&b, "ours", 1, 1, &peers).expect_err("another run");
        assert!(error.to_string().contains("another run"), "{error}");
        abort.abort("done");
    });
}

#[test]
fn a_neighbour_that_never_comes_is_named_at_the_deadline() {
    let (a, b) = (listener(), listener());
    let peers = addresses(&[&a, &b]);
    let membership = Membership::among("run", Generation(1), Rank(0), &peers);
    let deadline = Instant::now() + Duration::from_millis(100);
    let error = Ring::connect(&a, &membership, deadline, &RingAbort::new()).expect_err("rank 1 is not there");
    assert!(matches!(error, CollectiveError::Connect(_)), "{error}");
    assert!(error.to_string().contains("rank 1"), "{error}");
}

#[test]
fn a_port_that_something_else_listens_on_is_called_until_the_deadline() {
    let (a, web) = (listener(), TcpListener::bind("127.0.0.1:0").expect("bind"));
    let peers = vec![a.address().to_owned(), web.local_addr().expect("address").to_string()];
    let membership = Membership::among("run", Generation(1), Rank(0), &peers);
    thread::scope(|scope| {
        scope.spawn(move || {
            let (mut socket, _) = web.accept().expect("it is called");
            socket.read_exact(&mut [0; OPENING]).expect("it introduces itself");
            socket.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").expect("write");
        });
        let deadline = Instant::now() + Duration::from_millis(200);
        let error = Ring::connect(&a, &membership, deadline, &RingAbort::new()).expect_err("no rank there");
        assert!(error.to_string().contains("rank 1"), "{error}");
    });
}

#[test]
fn an_abort_ends_the_connecting() {
    let (a, b) = (listener(), listener());
    let peers = addresses(&[&a, &b]);
    let membership = Membership::among("run", Generation(1), Rank(0), &peers);
    let abort = RingAbort::new();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| Ring::connect(&a, &membership, soon(), &abort).map(drop));
        abort.abort("the run was stopped");
        let error = waiting.join().expect("no panic").expect_err("aborted");
        assert!(error.to_string().contains("the run was stopped"), "{error}");
    });
}

#[test]
fn a_rank_outside_its_world_and_a_port_in_use_are_errors() {
    let a = listener();
    let error = connect(&a, "run", 1, 2, &addresses(&[&a, &a])).expect_err("rank 2 of 2");
    assert!(matches!(error, CollectiveError::Connect(JoinError::Membership { .. })), "{error}");
    let error = RingListener::bind(a.address()).expect_err("in use");
    assert!(error.to_string().contains(a.address()), "{error}");
}

#[test]
fn a_ring_says_what_each_side_was_doing_when_they_disagree() {
    let mut connects = loopback(2).into_iter();
    let (zero, one) = (connects.next().expect("rank 0"), connects.next().expect("rank 1"));
    thread::scope(|scope| {
        scope.spawn(|| zero().barrier().expect_err("rank 1 is elsewhere"));
        let error =
            one().all_reduce(BufMut::F32(&mut [0.0; 5]), Reduce::Sum).expect_err("rank 0 is elsewhere");
        if let CollectiveError::Mismatch { detail, .. } = &error {
            assert!(detail.contains("barrier") && detail.contains("all_reduce"), "{detail}");
        }
    });
}
