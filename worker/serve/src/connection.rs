//! One client, from its first frame to its last.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::SocketAddr,
    sync::mpsc::{Receiver, RecvTimeoutError},
};

use coxswain_task::{NamedValues, Value, answers::SEED};
use tungstenite::{
    Error, Message, WebSocket,
    error::{CapacityError, ProtocolError},
    protocol::{CloseFrame, Role, WebSocketConfig, frame::coding::CloseCode},
};

use crate::{
    clock::Stopwatch,
    decode, encode,
    limits::{HEARD_EVERY, MAX_DRAINED_BYTES, MAX_OBSERVATION_BYTES},
    model::{Answer, GONE, Model},
    patience::Patience,
};

/// The frame that says that the server ends.
const GOING_AWAY: [u8; 4] = [0x88, 2, 0x03, 0xe9];

/// Answers a client until it goes. `rest` is what was read of its frames already. It may rest between two
/// observations for as long as it lives, and not within one.
pub fn attend<S: Read + Write>(stream: S, rest: Vec<u8>, from: SocketAddr, served: (&Model, &Patience)) {
    let (model, patience) = served;
    let config = WebSocketConfig::default()
        .max_message_size(Some(MAX_OBSERVATION_BYTES))
        .max_frame_size(Some(MAX_OBSERVATION_BYTES));
    let socket = WebSocket::from_partially_read(stream, rest, Role::Server, Some(config));
    model.metrics().came();
    tracing::info!(%from, "a client connected");
    let mut client = Client {
        socket,
        model,
        patience,
        from,
        next: None,
        observations: 0,
        refused: 0,
        last_total_ms: None,
    };
    let ended = client.attend();
    model.metrics().went();
    let Client { mut socket, observations, refused, .. } = client;
    match ended {
        Ok(()) | Err(Error::ConnectionClosed | Error::AlreadyClosed) => {}
        // Where it is this server that ends, its clients hear so; one that has gone does not.
        Err(error) if is_end(&error) => drop(socket.get_mut().write_all(&GOING_AWAY)),
        Err(error) => {
            tracing::info!(%from, observations, refused, "a client was lost: {error}");
            return;
        }
    }
    tracing::info!(%from, observations, refused, "a client disconnected");
}

/// Whether the connection has ended without a good-bye.
fn is_end(error: &Error) -> bool {
    match error {
        Error::Protocol(problem) => *problem == ProtocolError::ResetWithoutClosingHandshake,
        // The same, of TLS.
        Error::Io(error) => error.kind() == ErrorKind::UnexpectedEof,
        _ => false,
    }
}

/// A client that speaks frames.
struct Client<'m, S> {
    socket: WebSocket<S>,
    model: &'m Model,
    patience: &'m Patience,
    from: SocketAddr,
    /// What came while an answer was computed.
    next: Option<Result<Message, Error>>,
    /// Received so far.
    observations: i64,
    /// Observations that got no answer.
    refused: u64,
    /// From the last observation read to its answer written.
    last_total_ms: Option<f64>,
}

impl<S: Read + Write> Client<'_, S> {
    fn attend(&mut self) -> Result<(), Error> {
        let metadata = encode::encode_json(&self.model.reader().describe());
        self.socket.send(Message::binary(metadata))?;
        loop {
            let read = match self.next.take() {
                Some(read) => read,
                None => {
                    self.patience.rest();
                    self.socket.read()
                }
            };
            let message = match read {
                Ok(message) => message,
                Err(Error::Capacity(CapacityError::MessageTooLong { size, max_size })) => {
                    return self.refuse_huge(size, max_size);
                }
                Err(error) => return Err(error),
            };
            let stopwatch = Stopwatch::start();
            let answer = match message {
                Message::Binary(bytes) => self.answer(&bytes, stopwatch),
                Message::Text(_) => Err("observations are msgpack in binary frames; this was text".into()),
                // The library answers those itself.
                Message::Ping(_) | Message::Pong(_) | Message::Close(_) | Message::Frame(_) => continue,
            };
            if let Some(Ok(Message::Close(_))) = self.next {
                // It has heard enough, and its good-bye is answered.
                self.socket.flush()?;
                return Err(Error::ConnectionClosed);
            }
            match answer {
                Ok(answer) => {
                    self.model.metrics().answered(stopwatch.elapsed());
                    self.socket.send(Message::binary(answer))?;
                    self.last_total_ms = Some(stopwatch.milliseconds());
                }
                Err(problem) => self.refuse(problem)?,
            }
        }
    }

    /// The message that answers an observation, or what is wrong with it.
    fn answer(&mut self, bytes: &[u8], stopwatch: Stopwatch) -> Result<Vec<u8>, String> {
        let mut observation: NamedValues = decode::decode(bytes).map_err(|error| error.to_string())?;
        observation.entry(SEED.to_owned()).or_insert(Value::Integer(self.observations));
        self.observations += 1;
        let sample = self.model.reader().read(&observation).map_err(|refused| refused.to_string())?;
        let answered = self.model.ask(sample)?;
        let named = self.wait_for(&answered)?;
        let mut timing = vec![("infer_ms", stopwatch.milliseconds())];
        timing.extend(self.last_total_ms.map(|last| ("prev_total_ms", last)));
        Ok(encode::encode(&named, &timing))
    }

    /// Waits for an answer, and hears the client meanwhile: one that pings is told that the server lives.
    fn wait_for(&mut self, answered: &Receiver<Answer>) -> Answer {
        loop {
            match answered.recv_timeout(HEARD_EVERY) {
                Ok(answer) => return answer,
                Err(RecvTimeoutError::Timeout) => self.hear(),
                Err(RecvTimeoutError::Disconnected) => return Err(GONE.into()),
            }
        }
    }

    /// Takes what has come, if the client is to be heard at all: after its next observation, or its end, it
    /// is heard when that has its turn.
    fn hear(&mut self) {
        if self.next.is_some() {
            return;
        }
        let (patience, socket) = (self.patience, &mut self.socket);
        match patience.glance(|| socket.read()) {
            Err(Error::Io(error)) if error.kind() == ErrorKind::WouldBlock => {}
            // The library has put the answer to a ping in its queue. One who does not take it is lost when
            // the answer is sent.
            Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_)) => drop(socket.flush()),
            read => self.next = Some(read),
        }
    }

    fn refuse(&mut self, problem: String) -> Result<(), Error> {
        self.model.metrics().failed();
        self.refused += 1;
        match self.refused {
            1 => {
                tracing::info!(from = %self.from, problem, "an observation was refused (further ones of this client: debug log)")
            }
            _ => tracing::debug!(from = %self.from, problem, "an observation was refused"),
        }
        self.socket.send(Message::text(problem))
    }

    /// The rest of a frame that was not read stands between this client and its next one: it hears why, and
    /// the connection ends when all of it has been thrown away.
    fn refuse_huge(&mut self, size: usize, most: usize) -> Result<(), Error> {
        self.refuse(format!(
            "an observation of {size} bytes; at most {most} are accepted: send smaller images"
        ))?;
        let frame = CloseFrame { code: CloseCode::Size, reason: "the observation is too large".into() };
        self.socket.close(Some(frame))?;
        self.socket.flush()?;
        io::copy(&mut self.socket.get_mut().take(MAX_DRAINED_BYTES), &mut io::sink())?;
        Ok(())
    }
}
