//! Connections as they come in: up to a bound at once, whatever else the machine is short of.
//!
//! A task of its own accepts. Where there is no room for a connection (the bound, file descriptors, memory)
//! another one makes room (see [`standing`](crate::standing)), and the log says so once a minute; tonic would
//! end the server over it. What waits meanwhile, waits in the kernel. A connection on which no call is made
//! in time that may be made is ended. Where connections may come through TLS, each has a task that agrees on
//! it, so that nobody waits for a caller that says nothing. Those that may only look are read in turns (see
//! [`pace`](crate::pace)).

use std::{
    io::{self, ErrorKind, IoSlice},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use coxswain_identity::{Door, Stream as Wire};
use coxswain_proto::limits::{ACCEPT_PAUSE, NO_ROOM_PAUSE, READ_PIECE};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    task::JoinSet,
    time::Instant,
};
use tokio_stream::Stream;
use tonic::transport::server::Connected;

use crate::{
    clock,
    options::ConnectionBounds,
    pace::{Pause, Peer, ReaderQueue},
    standing::{Attendance, Standings},
};

/// A stream of accepted connections that does not end.
pub struct Connections {
    accepted: mpsc::Receiver<Connection>,
    /// Ends with the stream.
    _accepting: JoinSet<()>,
}

impl Connections {
    /// Connections that call at `listener` and come through `door`: so many at once, and so long until the
    /// first call.
    pub fn new(listener: TcpListener, door: Door, bounds: ConnectionBounds) -> Self {
        let listener = Arc::new(listener);
        let accept = move || {
            let listener = listener.clone();
            async move { Ok(listener.accept().await?.0) }
        };
        Self::up_to(bounds, door, accept)
    }

    fn up_to<F>(bounds: ConnectionBounds, door: Door, accept: impl Fn() -> F + Send + 'static) -> Self
    where
        F: Future<Output = io::Result<TcpStream>> + Send + 'static,
    {
        let (sender, accepted) = mpsc::channel(1);
        let mut accepting = JoinSet::new();
        let ConnectionBounds { most, first_call, .. } = bounds;
        let entrance = Entrance {
            door,
            connections: sender,
            first_call,
            queue: ReaderQueue::default(),
            refused: Arc::default(),
        };
        accepting.spawn(accept_all(Arc::new(Semaphore::new(most)), accept, entrance));
        Self { accepted, _accepting: accepting }
    }
}

async fn accept_all<F>(places: Arc<Semaphore>, accept: impl Fn() -> F + Send, entrance: Entrance)
where
    F: Future<Output = io::Result<TcpStream>> + Send,
{
    let (standings, mut told) = (Standings::default(), None);
    loop {
        match accept().await {
            Ok(stream) => {
                let place = loop {
                    match places.clone().try_acquire_owned() {
                        Ok(place) => break place,
                        Err(_) => {
                            tell_once_a_minute(&mut told, "the coordinator's limit is reached");
                            standings.make_room(ACCEPT_PAUSE).await;
                        }
                    }
                };
                let attendance = standings.enter();
                if entrance.door.takes_time() {
                    // Ends within a bounded time; until then it has its place.
                    tokio::spawn(entrance.clone().admit(stream, attendance, place));
                } else if !entrance.clone().admit(stream, attendance, place).await {
                    return;
                }
            }
            // Of the connection, not of the machine.
            Err(error)
                if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset) => {}
            Err(error) => {
                tell_once_a_minute(&mut told, &format!("{error} (`ulimit -n` sets the limit)"));
                standings.make_room(ACCEPT_PAUSE).await;
            }
        }
    }
}

fn tell_once_a_minute(told: &mut Option<Instant>, why: &str) {
    let now = clock::monotonic();
    if told.is_some_and(|told| now.duration_since(told) < NO_ROOM_PAUSE) {
        return;
    }
    *told = Some(now);
    tracing::warn!(
        target: "coxswain::run", why,
        "too many connections: {why}; closing the oldest one that has made no call, or only read calls"
    );
}

/// Where connections come in.
#[derive(Clone)]
struct Entrance {
    door: Door,
    connections: mpsc::Sender<Connection>,
    first_call: Duration,
    queue: ReaderQueue,
    refused: Arc<AtomicU64>,
}

impl Entrance {
    /// Finds out who has called, and hands the connection on; false if nobody takes it any more.
    async fn admit(self, stream: TcpStream, attendance: Attendance, place: OwnedSemaphorePermit) -> bool {
        let from = stream.peer_addr().map(|from| from.to_string()).unwrap_or_default();
        let greeted = tokio::select! {
            greeted = self.door.greet(stream) => greeted,
            () = attendance.ended(self.first_call) => return true,
        };
        match greeted {
            Ok((stream, caller)) => {
                let peer = Arc::new(Peer::new(caller, attendance));
                let (ours, patience) = (peer.clone(), self.first_call);
                let ended: EndFuture = Box::pin(async move { ours.attendance.ended(patience).await });
                let (queue, ended) = (self.queue, Some(ended));
                let connection = Connection { stream, _place: place, peer, ended, queue, pause: None };
                self.connections.send(connection).await.is_ok()
            }
            // A probe that only looks whether the port is open.
            Err(error) if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) => {
                tracing::debug!(from, "a client disconnected before its first call: {error}");
                true
            }
            Err(error) => {
                let count = self.refused.fetch_add(1, Ordering::Relaxed) + 1;
                if is_told(count) {
                    tracing::warn!(
                        target: "coxswain::run", from, count,
                        "rejected a client at {from} ({count} rejected so far): {error}"
                    );
                } else {
                    tracing::debug!(from, count, "rejected a client: {error}");
                }
                true
            }
        }
    }
}

/// Whether the log names a caller that is turned away: something on the network may call every few seconds,
/// for weeks. The first ones, and then ever fewer.
fn is_told(count: u64) -> bool {
    count <= 8 || count.is_power_of_two()
}

impl Stream for Connections {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.accepted.poll_recv(context).map(|connection| connection.map(Ok))
    }
}

/// A connection, and its place among those that may be open.
pub struct Connection {
    stream: Wire,
    /// Given back before others hear that it has gone.
    _place: OwnedSemaphorePermit,
    peer: Arc<Peer>,
    /// When it has to end; none once it has.
    ended: Option<EndFuture>,
    queue: ReaderQueue,
    pause: Option<Pause>,
}

type EndFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Connected for Connection {
    type ConnectInfo = Arc<Peer>;

    fn connect_info(&self) -> Arc<Peer> {
        self.peer.clone()
    }
}

impl Connection {
    /// Fails once it has to end.
    fn check_end(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let has_ended = |ended: &mut EndFuture| ended.as_mut().poll(context).is_ready();
        match self.ended.take_if(has_ended).is_some() || self.ended.is_none() {
            true => Err(ErrorKind::ConnectionAborted.into()),
            false => Ok(()),
        }
    }

    /// Reads a piece, and then nothing until it is its turn again.
    fn poll_read_piece(
        &mut self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut piece = [0; READ_PIECE.0];
        let mut piece = ReadBuf::new(&mut piece[..READ_PIECE.0.min(buffer.remaining())]);
        ready!(Pin::new(&mut self.stream).poll_read(context, &mut piece))?;
        buffer.put_slice(piece.filled());
        self.pause = self.peer.pause_after(piece.filled().len(), &self.queue);
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check_end(context)?;
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(context));
            self.pause = None;
        }
        match self.peer.is_trusted(clock::monotonic()) {
            true => Pin::new(&mut self.stream).poll_read(context, buffer),
            false => self.poll_read_piece(context, buffer),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check_end(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check_end(context)?;
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, atomic::AtomicUsize};

    use coxswain_proto::limits::{GREETING, REFUSED_PAUSE};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio_stream::StreamExt;

    use super::*;
    use crate::standing::Standing;

    /// Two connections, or errors, that are there at once, and how many have been accepted.
    async fn ready(
        errors: usize,
    ) -> (Arc<AtomicUsize>, impl Fn() -> std::future::Ready<io::Result<TcpStream>> + Send + 'static) {
        // EMFILE.
        let mut queue: Vec<_> = (0..errors).map(|_| Err(io::Error::from_raw_os_error(24))).collect();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        for _ in 0..3 {
            let calling = TcpStream::connect(listener.local_addr().unwrap());
            let (called, accepted) = tokio::join!(calling, listener.accept());
            called.unwrap();
            queue.push(Ok(accepted.unwrap().0));
        }
        let (accepted, queue) = (Arc::new(AtomicUsize::new(0)), Mutex::new(queue.into_iter()));
        let counted = accepted.clone();
        let accept = move || {
            let next = queue.lock().unwrap().next().unwrap_or_else(|| Err(io::Error::from_raw_os_error(24)));
            counted.fetch_add(usize::from(next.is_ok()), Ordering::Relaxed);
            std::future::ready(next)
        };
        (accepted, accept)
    }

    #[tokio::test]
    async fn accepting_goes_on_when_there_are_file_descriptors_again() {
        let (_, accept) = ready(2).await;
        let mut connections = Connections::up_to(ConnectionBounds::default(), Door::default(), accept);
        assert!(connections.next().await.is_some_and(|connection| connection.is_ok()));
    }

    #[tokio::test]
    async fn a_connection_on_which_a_read_was_refused_is_read_a_piece_at_a_time() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut connections = Connections::new(listener, Door::default(), ConnectionBounds::default());
        let mut caller = TcpStream::connect(address).await.unwrap();
        let mut connection = connections.next().await.unwrap().unwrap();
        let piece = READ_PIECE.0;
        caller.write_all(&vec![0; 3 * piece + GREETING]).await.unwrap();
        connection.peer.refuse(clock::monotonic());
        let mut bytes = vec![0; 2 * piece + GREETING];
        assert_eq!(connection.read(&mut bytes).await.unwrap(), piece);
        let since = clock::monotonic();
        assert_eq!(connection.read(&mut bytes).await.unwrap(), piece);
        assert!(since.elapsed() >= REFUSED_PAUSE / 2, "{:?}", since.elapsed());
    }

    #[tokio::test]
    async fn a_connection_that_may_do_more_than_look_is_read_as_it_comes() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut connections = Connections::new(listener, Door::default(), ConnectionBounds::default());
        let mut caller = TcpStream::connect(address).await.unwrap();
        let mut connection = connections.next().await.unwrap().unwrap();
        caller.write_all(&[0; 2 * GREETING]).await.unwrap();
        let mut bytes = [0; 2 * GREETING];
        assert_eq!(connection.read(&mut bytes).await.unwrap(), READ_PIECE.0, "it has shown nothing yet");
        connection.peer.attendance.rise(Standing::Member);
        assert_eq!(connection.read(&mut bytes).await.unwrap(), 2 * GREETING - READ_PIECE.0);
    }

    #[test]
    fn a_caller_that_does_not_give_up_fills_no_log() {
        assert!((1..=8).all(is_told));
        assert_eq!((1..=1_000_000).filter(|count| is_told(*count)).count(), 8 + 16);
    }

    #[tokio::test]
    async fn no_more_are_open_than_the_bound_allows_and_a_stranger_makes_room() {
        let (accepted, accept) = ready(0).await;
        let bounds = ConnectionBounds { most: 1, ..Default::default() };
        let mut connections = Connections::up_to(bounds, Door::default(), accept);
        let mut first = connections.next().await.unwrap().unwrap();
        // It is told to end for the next one, and has its place until it has.
        let ended = first.read(&mut [0]).await;
        assert_eq!(ended.unwrap_err().kind(), ErrorKind::ConnectionAborted);
        // On this thread the other task has run for as long as it can.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert!(connections.accepted.try_recv().is_err());
        assert_eq!(accepted.load(Ordering::Relaxed), 2, "one waits");
        drop(first);
        connections.next().await.unwrap().unwrap();
    }
}
