//! Asks the other ranks for their parts of a block: all at once, so that they answer side by side.
//!
//! A rank that cannot be reached, or from which nothing comes for a while, is left alone for a time, and its
//! parts are left to the caller to find elsewhere. So a rank that has just been lost costs one wait at most,
//! and one that was merely slow is asked again.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    sync::{Mutex, PoisonError},
    time::Instant,
};

use coxswain_identity::Tokens;
use coxswain_nn::sharded::{Cut, Fetch, Peers};
use coxswain_proto::limits::{PART_PAUSE, PART_TIMEOUT};

use super::wire::{ANSWER, Greeting, GreetingReply, NOT_HERE, PROVEN_ANSWER, ask, decode_answer, hear};
use crate::{
    clock,
    collective::{
        proof::{NONCE, RingKey, Role, Transcript, nonce},
        ring::prepare,
    },
};

/// Bytes between two looks at whether they are still waited for.
const PIECE: usize = 1 << 20;

/// Who asks.
#[derive(Clone, Debug)]
pub struct Caller {
    /// Names the run and its specification.
    pub run: [u8; 32],
    /// Names how blocks are cut up.
    pub blocks: [u8; 32],
    /// This rank's part.
    pub cut: Cut,
    /// What ranks prove to each other; nothing where there are none.
    pub tokens: Option<Tokens>,
}

/// The other ranks of a generation, as they are reached over the network.
pub struct RemotePeers {
    caller: Caller,
    addresses: Vec<Option<SocketAddr>>,
    lines: Mutex<Vec<Connection>>,
}

/// The way to a rank.
#[derive(Debug)]
enum Connection {
    Closed,
    Open(TcpStream),
    LeftAlone(Instant),
}

impl RemotePeers {
    /// The ranks that answer at these addresses, in their order.
    pub fn new(caller: Caller, addresses: Vec<Option<SocketAddr>>) -> Self {
        let lines = addresses.iter().map(|_| Connection::Closed).collect();
        Self { caller, addresses, lines: Mutex::new(lines) }
    }

    /// Puts the question to a rank; false if it is left alone, or has no address.
    fn put(&self, line: &mut Connection, rank: usize, block: usize) -> io::Result<bool> {
        match line {
            Connection::LeftAlone(since) if since.elapsed() < PART_PAUSE => return Ok(false),
            Connection::Open(socket) => {
                ask(&*socket, block)?;
                return Ok(true);
            }
            Connection::LeftAlone(_) | Connection::Closed => {}
        }
        let Some(address) = self.addresses.get(rank).copied().flatten() else { return Ok(false) };
        let socket = self.call(address, rank)?;
        ask(&socket, block)?;
        *line = Connection::Open(socket);
        Ok(true)
    }

    fn call(&self, address: SocketAddr, rank: usize) -> io::Result<TcpStream> {
        let mut socket = TcpStream::connect_timeout(&address, PART_TIMEOUT)?;
        socket.set_read_timeout(Some(PART_TIMEOUT))?;
        socket.set_write_timeout(Some(PART_TIMEOUT))?;
        prepare(&socket)?;
        let Caller { run, blocks, cut, tokens } = &self.caller;
        let [own, to, world] = [cut.rank, rank, cut.world].map(|number| number as u32);
        let hello = Greeting { run: *run, blocks: *blocks, rank: own, to, world };
        // The token that is valid now, each time.
        let key = RingKey::to_call(tokens.as_ref());
        let opening = hello.first_bytes(key.name, nonce().map_err(io::Error::other)?);
        socket.write_all(&opening)?;
        let challenge: [u8; NONCE] = hear(&socket)?;
        let asked = Transcript { opening: &opening, challenge: &challenge, answer: &[] };
        socket.write_all(&key.prove(Role::Caller, &asked))?;
        let proven: [u8; PROVEN_ANSWER] = hear(&socket)?;
        let answer: [u8; ANSWER] = std::array::from_fn(|i| proven[i]);
        let proof = std::array::from_fn(|i| proven[ANSWER + i]);
        if !key.proves(Role::Called, &Transcript { answer: &answer, ..asked }, proof) {
            return Err(io::Error::other("a program that is not a rank of this run listens there"));
        }
        match decode_answer(&answer) {
            Some(GreetingReply::Welcome) => Ok(socket),
            Some(verdict) => Err(io::Error::other(verdict.to_string())),
            None => Err(io::Error::other("its answer is not understood; does it run the same cox version?")),
        }
    }
}

/// How an answer ended.
enum Answer {
    Came,
    NotHere,
    NotWaitedFor,
}

/// Reads an answer into its places.
fn read(mut socket: &TcpStream, wanted: &mut Fetch<'_>, goes_on: &dyn Fn() -> bool) -> io::Result<Answer> {
    let length = u64::from_le_bytes(hear(socket)?);
    if length == NOT_HERE {
        return Ok(Answer::NotHere);
    }
    if length != wanted.len() as u64 {
        let what = format!("it sent {length} bytes instead of {}", wanted.len());
        return Err(io::Error::new(ErrorKind::InvalidData, what));
    }
    for piece in wanted.places.iter_mut().flat_map(|place| place.chunks_mut(PIECE)) {
        socket.read_exact(piece)?;
        if !goes_on() {
            return Ok(Answer::NotWaitedFor);
        }
    }
    wanted.came = true;
    Ok(Answer::Came)
}

/// Leaves a rank alone for a while, after this.
fn leave_alone(line: &mut Connection, rank: usize, error: &io::Error) {
    tracing::warn!(rank, %error, "cannot get a rank's part of the frozen weights from that rank; the part is read from the model's files until the rank answers again");
    *line = Connection::LeftAlone(clock::now());
}

impl Peers for RemotePeers {
    fn fetch(&self, block: usize, wanted: &mut [Fetch<'_>], goes_on: &dyn Fn() -> bool) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let mut asked = Vec::with_capacity(wanted.len());
        for wanted in wanted.iter_mut().filter(|wanted| !wanted.is_empty()) {
            let Some(line) = lines.get_mut(wanted.rank) else { continue };
            match self.put(line, wanted.rank, block) {
                Ok(true) => asked.push(wanted),
                Ok(false) => {}
                Err(error) => leave_alone(line, wanted.rank, &error),
            }
        }
        let mut is_waited_for = true;
        for wanted in asked {
            let line = &mut lines[wanted.rank];
            let Connection::Open(socket) = line else { continue };
            if !is_waited_for {
                // What it answers would be taken for the answer to the next question.
                *line = Connection::Closed;
                continue;
            }
            match read(socket, wanted, goes_on) {
                Ok(Answer::Came | Answer::NotHere) => {}
                Ok(Answer::NotWaitedFor) => {
                    is_waited_for = false;
                    *line = Connection::Closed;
                }
                Err(error) => leave_alone(line, wanted.rank, &error),
            }
        }
    }
}
