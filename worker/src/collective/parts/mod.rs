//! Parts of frozen weights, asked of the rank that holds them (`memory.shard: frozen`): beside the
//! collectives, on connections of their own.
//!
//! ```text
//! wire      what is said: who calls, which block, its bytes
//! server    one a process: answers for the part that this rank holds, on threads that compute nothing
//! client    asks all ranks for their parts of a block at once, then reads the answers
//! ```
//!
//! Nothing here is collective. A rank asks when it needs a block, and is answered whatever the other does: in
//! a pass of its own, in another number of passes, in a vote, paused. So no order has to be agreed on, and no
//! rank that fails in mid-pass leaves another one waiting. Only the addresses are exchanged together, once a
//! generation ([`exchange`]).
//!
//! A rank that does not answer is no fault either: its part is read from the files, with the same bits, and
//! whether it is lost is for the ring and the coordinator to find.
//!
//! Callers prove the token that ranks of the ring prove; what follows is neither encrypted nor signed, as in
//! the ring. What this module does not do: know tensors, or read files.

mod client;
mod server;
#[cfg(test)]
mod tests;
mod wire;

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

pub use client::{Caller, RemotePeers};
pub use server::PartServer;

use super::{Buf, BufMut, Collective, CollectiveError};

/// Numbers that an address takes: eight groups of an IPv6 address two by two, and a port.
const WORDS: usize = 5;

/// All ranks tell each other where they answer for their parts; none for a rank that does not.
pub fn exchange(
    comm: &mut dyn Collective,
    own: Option<SocketAddr>,
) -> Result<Vec<Option<SocketAddr>>, CollectiveError> {
    let words = own.map_or([0.0; WORDS], encoded);
    let mut all = vec![0.0; WORDS * comm.world()];
    comm.all_gather(Buf::F64(&words), BufMut::F64(&mut all))?;
    Ok(all.as_chunks::<WORDS>().0.iter().map(decoded).collect())
}

fn encoded(address: SocketAddr) -> [f64; WORDS] {
    let octets = match address.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    };
    let mut words = [f64::from(address.port()); WORDS];
    for (word, octets) in words.iter_mut().zip(octets.as_chunks::<4>().0) {
        *word = f64::from(u32::from_be_bytes(*octets));
    }
    words
}

/// Another rank's word: what is no address is none.
fn decoded(words: &[f64; WORDS]) -> Option<SocketAddr> {
    let port = words[WORDS - 1];
    let is_port = port.fract() == 0.0 && (1.0..=f64::from(u16::MAX)).contains(&port);
    let mut octets = [0; 16];
    for (octets, word) in octets.as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *octets = (*word as u32).to_be_bytes();
    }
    let ip = Ipv6Addr::from(octets);
    let ip = ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4);
    is_port.then(|| SocketAddr::new(ip, port as u16))
}
