//! The port, a thread for each client, and their end.

use std::{
    collections::BTreeMap,
    io::{self, ErrorKind},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::Duration,
};

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use crate::{
    connection,
    error::ServeError,
    http,
    limits::MAX_CLIENTS,
    model::Model,
    tls::{self, Tls},
};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// A client whose machine is gone is missed after about this long, and three probes.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// Sending a request, or taking an answer, may pause for this long.
const STALL: Duration = Duration::from_secs(10);
/// Between two observations a client may be silent for as long as it lives.
const SILENCE: Option<Duration> = None;
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

/// Clients that are connected, by the number of their connection.
#[derive(Debug, Default)]
struct Clients {
    connected: Mutex<Connected>,
    gone: Condvar,
}

#[derive(Debug, Default)]
struct Connected {
    next: u64,
    streams: BTreeMap<u64, TcpStream>,
    closing: bool,
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
        self.clients.lock().closing = true;
        // Both wake the thread that waits there; it may have ended by itself.
        let _ = self.listening.shutdown(Shutdown::Both);
        let _ = self.accepting.join();
        let connected = self.clients.lock();
        // A client's thread finds the end of its stream behind the observation that it is at.
        connected.streams.values().for_each(|stream| drop(stream.shutdown(Shutdown::Read)));
        let waited = self.clients.gone.wait_timeout_while(connected, DRAIN, |c| !c.streams.is_empty());
        waited.unwrap_or_else(PoisonError::into_inner).0.streams.len()
    }
}

impl Clients {
    fn lock(&self) -> MutexGuard<'_, Connected> {
        self.connected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of a new connection, or why it gets none.
    fn admit(&self, stream: &TcpStream) -> Result<u64, String> {
        let stream = stream.try_clone().map_err(|error| error.to_string())?;
        let mut connected = self.lock();
        if connected.closing {
            return Err("the server is ending".to_owned());
        }
        if connected.streams.len() == MAX_CLIENTS {
            return Err(format!("{MAX_CLIENTS} clients are connected"));
        }
        let number = connected.next;
        connected.next += 1;
        connected.streams.insert(number, stream);
        Ok(number)
    }

    fn remove(&self, number: u64) {
        self.lock().streams.remove(&number);
        self.gone.notify_all();
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
            Err(_) if clients.lock().closing => return,
            Err(error) => {
                // Out of file descriptors, mostly: another client has to go first.
                tracing::warn!(%error, "a client cannot be accepted");
                let full = clients.lock();
                drop(clients.gone.wait_timeout(full, Duration::from_secs(1)));
                continue;
            }
        };
        let number = match clients.admit(&stream) {
            Ok(number) => number,
            Err(why) => {
                tracing::warn!(%from, "refused: {why}");
                continue;
            }
        };
        let leaves = Leaves { clients: clients.clone(), number };
        let (model, door) = (model.clone(), door.clone());
        let body = move || {
            let _leaves = leaves;
            match attend(&stream, from, &door, &model) {
                Ok(()) => {}
                // It has gone: what asks whether a port is open does that.
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    tracing::info!(%from, "turned away: nothing came from it for {} s", STALL.as_secs());
                }
                Err(error) => tracing::info!(%from, "turned away: {error}"),
            }
        };
        if let Err(error) = thread::Builder::new().name(format!("client-{number}")).spawn(body) {
            tracing::warn!(%from, %error, "no thread for a client");
        }
    }
}

/// One client, from its first byte to its last. Fails if it could not be let in.
fn attend(stream: &TcpStream, from: SocketAddr, door: &Door, model: &Model) -> io::Result<()> {
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE).with_retries(3);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)?;
    // Answers are small, and waited for.
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(STALL))?;
    stream.set_read_timeout(Some(STALL))?;
    let mut in_clear = stream;
    let token = door.token.as_deref();
    let Some(tls) = &door.tls else {
        let Some(rest) = http::greet(&mut in_clear, from, token, model.metrics())? else { return Ok(()) };
        stream.set_read_timeout(SILENCE)?;
        connection::attend(in_clear, rest, from, model);
        return Ok(());
    };
    if http::is_in_clear(stream)? {
        tracing::info!(%from, "turned away: it speaks in clear");
        return http::refuse_in_clear(&mut in_clear);
    }
    let mut decrypted = tls.accept(in_clear, http::PATIENCE)?;
    if let Some(rest) = http::greet(&mut decrypted, from, token, model.metrics())? {
        stream.set_read_timeout(SILENCE)?;
        connection::attend(&mut decrypted, rest, from, model);
    }
    tls::close(&mut decrypted);
    Ok(())
}
