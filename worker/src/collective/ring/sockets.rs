//! Sockets of a ring: where the previous rank calls, and how connections are set up.

use std::{
    io::{self, ErrorKind},
    net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs},
    time::Duration,
};

use coxswain_identity::Tokens;
use coxswain_proto::limits::BACKLOG;
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use crate::collective::JoinError;

/// Send buffer of a connection within one machine. What is in flight then stays in the L2 cache: measured on
/// loopback, an all-reduce takes half the processor time that it takes with 4 MiB. Less than three packets of
/// the loopback device (64 KiB) must not be: the sender would wait for delayed acknowledgements. The kernel
/// doubles it for its bookkeeping.
const SAME_HOST_SEND_BUFFER: usize = 192 << 10;

/// Where the previous rank calls. Opened before registration, because its address is what is registered; it
/// outlives generations.
#[derive(Debug)]
pub struct RingListener {
    pub(super) listener: TcpListener,
    address: String,
    pub(super) shared_memory: bool,
    /// What ranks prove to each other; nothing where there are none.
    pub(super) tokens: Option<Tokens>,
}

impl RingListener {
    /// Listens on `address`, for example `10.0.0.5:0` for any free port of that interface.
    pub fn bind(address: &str) -> Result<Self, JoinError> {
        let open = || -> io::Result<TcpListener> {
            let mut last = io::Error::new(ErrorKind::InvalidInput, "the name has no address");
            for candidate in address.to_socket_addrs()? {
                match listen(candidate) {
                    Ok(listener) => return Ok(listener),
                    Err(error) => last = error,
                }
            }
            Err(last)
        };
        let with_context = |source| JoinError::Listen { address: address.to_owned(), source };
        let listener = open().map_err(with_context)?;
        let address = listener.local_addr().map_err(with_context)?.to_string();
        Ok(Self { listener, address, shared_memory: true, tokens: None })
    }

    /// Whether neighbours on the same machine may use shared memory; they do if this is not called.
    pub fn with_shared_memory(self, allowed: bool) -> Self {
        Self { shared_memory: allowed, ..self }
    }

    /// Ranks prove to each other that they share one of these tokens, with the scope of workers.
    pub fn with_tokens(self, tokens: Option<Tokens>) -> Self {
        Self { tokens, ..self }
    }

    /// What ranks prove to each other; nothing where there are none.
    pub fn tokens(&self) -> Option<&Tokens> {
        self.tokens.as_ref()
    }

    /// The interface that it listens on; an error if that is all of them, which is nobody's address.
    pub fn ip(&self) -> io::Result<IpAddr> {
        let ip = self.listener.local_addr()?.ip();
        match ip.is_unspecified() {
            true => Err(io::Error::new(ErrorKind::AddrNotAvailable, "the ring listens on all interfaces")),
            false => Ok(ip),
        }
    }

    /// The address to register: the one bound to, with the port that was given.
    pub fn address(&self) -> &str {
        &self.address
    }
}

/// Listens without blocking who accepts.
pub(in crate::collective) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// No delay, and keep-alive so that a machine that vanished is noticed on an idle connection after about a
/// minute. There is no user timeout on purpose: it would also end connections to a neighbour that is alive
/// and busy. Buffers between machines are left to the kernel, which grows them as the network needs.
pub(in crate::collective) fn prepare<'a>(socket: impl Into<SockRef<'a>>) -> io::Result<()> {
    let socket = socket.into();
    socket.set_tcp_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(30))
        .with_interval(Duration::from_secs(10))
        .with_retries(3);
    socket.set_tcp_keepalive(&keepalive)?;
    let ip = |address: socket2::SockAddr| address.as_socket().map(|address| address.ip());
    let (ours, theirs) = (ip(socket.local_addr()?), ip(socket.peer_addr()?));
    if ours == theirs || theirs.is_some_and(|ip| ip.is_loopback()) {
        socket.set_send_buffer_size(SAME_HOST_SEND_BUFFER)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpStream};

    use super::*;

    #[test]
    fn more_callers_may_wait_than_programs_have_by_default() {
        let listener = listen((Ipv4Addr::LOCALHOST, 0).into()).expect("a port");
        let address = listener.local_addr().expect("it listens");
        // Nothing accepts them. One for whom there is no room is answered after a second at the earliest.
        let call = |_| TcpStream::connect_timeout(&address, Duration::from_millis(500));
        let waiting: Vec<_> = (0..200).map_while(|caller| call(caller).ok()).collect();
        let most = std::fs::read_to_string("/proc/sys/net/core/somaxconn").expect("Linux has it");
        let most: usize = most.trim().parse().expect("a number");
        assert!(waiting.len() >= most.min(200), "{} of 200 may wait", waiting.len());
    }
}
