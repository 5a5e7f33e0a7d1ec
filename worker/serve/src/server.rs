//! The port, a thread for each client, and their end.

use std::{
    io::{self, ErrorKind},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use crate::{
    clients::Clients,
    connection,
    error::ServeError,
    http::{self, Greeting},
    limits::{AUTHENTICATION, MAX_CLIENTS, MAX_STRANGERS, STALL},
    model::Model,
    patience::{PacedStream, Patience},
    tls::{self, Tls},
};

/// Connections that wait to be accepted: as many as may be there at once.
const BACKLOG: i32 = (MAX_CLIENTS + MAX_STRANGERS) as i32;
/// A client whose machine is gone is missed after about this long, and three probes.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// How long answers under way are waited for at the end.
const DRAIN: Duration = Duration::from_secs(10);

/// A port that is ours and does not answer yet: the policy is loaded first.
#[derive(Debug)]
pub struct Port {
    socket: Socket,
    address: SocketAddr,
}

impl Port {
    /// Takes the port; 0 is any that is free.
    pub fn bind(address: SocketAddr) -> Result<Self, ServeError> {
        let bound = || {
            let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
            socket.set_reuse_address(true)?;
            socket.bind(&address.into())?;
            let address = socket.local_addr()?.as_socket().unwrap_or(address);
            Ok(Self { socket, address })
        };
        bound().map_err(|source| ServeError::Port { address, source })
    }
}

/// How clients come in.
#[derive(Clone, Default)]
pub struct Door {
    /// They must bring it.
    pub token: Option<String>,
    /// They must speak TLS.
    pub tls: Option<Tls>,
}

/// A server that answers.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    /// The listening socket once more, to end it.
    listening: Socket,
    clients: Arc<Clients>,
    accepting: JoinHandle<()>,
}

impl Server {
    /// Opens the port.
    pub fn start(port: Port, model: Model, door: Door) -> Result<Self, ServeError> {
        let Port { socket, address } = port;
        let failed = |source| ServeError::Port { address, source };
        socket.listen(BACKLOG).map_err(failed)?;
        let listening = socket.try_clone().map_err(failed)?;
        let clients = Arc::new(Clients::default());
        let accepted = clients.clone();
        let listener: TcpListener = socket.into();
        let body = move || accept(&listener, &accepted, &model, &Arc::new(door));
        let accepting =
            thread::Builder::new().name("accept".into()).spawn(body).map_err(ServeError::Thread)?;
        Ok(Self { address, listening, clients, accepting })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes no more observations, answers those that are under way, and ends. Returns how many clients had
    /// not gone in time.
    pub fn stop(self) -> usize {
        self.clients.close();
        // Both wake the thread that waits there; it may have ended by itself.
        let _ = self.listening.shutdown(Shutdown::Both);
        let _ = self.accepting.join();
        self.clients.drain(DRAIN)
    }
}

/// Removes a client when its thread ends, however it ends.
struct Leaves {
    clients: Arc<Clients>,
    number: u64,
}

impl Drop for Leaves {
    fn drop(&mut self) {
        self.clients.remove(self.number);
    }
}

fn accept(listener: &TcpListener, clients: &Arc<Clients>, model: &Model, door: &Arc<Door>) {
    loop {
        let (stream, from) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(_) if clients.are_closing() => return,
            Err(error) => {
                // Out of file descriptors, mostly: another client has to go first.
                tracing::warn!(%error, "a client cannot be accepted");
                clients.wait_for_room();
                continue;
            }
        };
        let number = match clients.admit(&stream, from) {
            Ok(number) => number,
            Err(why) => {
                clients.refuse(from, &why);
                continue;
            }
        };
        let leaves = Leaves { clients: clients.clone(), number };
        let (model, door) = (model.clone(), door.clone());
        let body = move || {
            let visit = Visit { stream: &stream, from, door: &door, model: &model, leaves: &leaves };
            match visit.attend() {
                Ok(()) => {}
                // It has gone: what asks whether a port is open does that.
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let why = format!("it sent nothing for {} s", STALL.as_secs());
                    leaves.clients.refuse(from, &why);
                }
                Err(error) => leaves.clients.refuse(from, &error.to_string()),
            }
        };
        if let Err(error) = thread::Builder::new().name(format!("client-{number}")).spawn(body) {
            tracing::warn!(%from, %error, "cannot start a thread for a client");
        }
    }
}

/// One connection, and what it needs.
struct Visit<'a> {
    stream: &'a TcpStream,
    from: SocketAddr,
    door: &'a Door,
    model: &'a Model,
    leaves: &'a Leaves,
}

impl Visit<'_> {
    /// From its first byte to its last. Fails if it could not be let in.
    fn attend(&self) -> io::Result<()> {
        let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE).with_retries(3);
        SockRef::from(self.stream).set_tcp_keepalive(&keepalive)?;
        // Answers are small, and waited for.
        self.stream.set_nodelay(true)?;
        self.stream.set_write_timeout(Some(STALL))?;
        let patience = Patience::with_a_stranger();
        let mut paced = PacedStream::new(self.stream, &patience);
        let Some(tls) = &self.door.tls else { return self.serve(&mut paced, &patience) };
        match paced.first()? {
            None => return Err(ErrorKind::UnexpectedEof.into()),
            Some(http::TLS_HANDSHAKE) => {}
            Some(_) => {
                self.leaves.clients.refuse(self.from, "it does not use TLS");
                return http::refuse_in_clear(&mut paced);
            }
        }
        let mut decrypted = tls.accept(paced, AUTHENTICATION)?;
        let served = self.serve(&mut decrypted, &patience);
        tls::close(&mut decrypted);
        served
    }

    fn serve(&self, stream: &mut (impl io::Read + io::Write), patience: &Patience) -> io::Result<()> {
        let Leaves { clients, number } = self.leaves;
        let let_in = || clients.let_in(*number);
        match http::greet(stream, self.door.token.as_deref(), self.model.metrics(), let_in)? {
            Greeting::Client(rest) => connection::attend(stream, rest, self.from, (self.model, patience)),
            Greeting::Visitor => {}
            // Never what it has sent: nearly the token, perhaps.
            Greeting::Refused(why) => clients.refuse(self.from, why),
        }
        Ok(())
    }
}
