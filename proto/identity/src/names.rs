//! Addresses of names, as long as a name server answers and beyond it.
//!
//! A coordinator that is called by its name is called again whenever its connection is lost, for as long as
//! the run lasts. A name server that hangs then must not cost the run what is known: addresses that were
//! found before serve until there are newer ones.
//!
//! A lookup cannot be called off, and the system's may take ten seconds for each server that is silent:
//! longer than a caller waits for its connection. So one is under way for each name at most, on a thread
//! that no process waits for when it ends; its answer is kept whether or not somebody still waits for it,
//! and the next caller finds it.

use std::{
    collections::HashMap,
    io,
    net::{SocketAddr, ToSocketAddrs},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use hyper_util::client::legacy::connect::dns::Name;
use tokio::sync::{oneshot, watch};
use tonic::codegen::Service;

/// How long a lookup is waited for where addresses of an earlier one are known.
const PATIENCE: Duration = Duration::from_secs(2);

/// What is known of names; shared by all connections of a channel.
#[derive(Clone)]
pub(crate) struct Names {
    known: Arc<Mutex<HashMap<String, NameRecord>>>,
    ask: Arc<dyn Fn(&str) -> Answer + Send + Sync>,
    patience: Duration,
}

type Answer = Pin<Box<dyn Future<Output = io::Result<Vec<SocketAddr>>> + Send>>;

/// What is known of one name.
#[derive(Clone, Default)]
struct NameRecord {
    /// The newest addresses that were found.
    addresses: Vec<SocketAddr>,
    /// The lookup that is under way: why it has failed, or nothing. Closed when it has ended.
    lookup: Option<watch::Receiver<Option<String>>>,
}

impl Names {
    /// As the system resolves them.
    pub fn of_the_system() -> Self {
        // The port is the connector's to fill in.
        let ask = |name: &str| -> Answer {
            let (tell, told) = oneshot::channel();
            let name = name.to_owned();
            let started = std::thread::Builder::new().name("name".into()).spawn(move || {
                // Nobody may be left who waits for it.
                drop(tell.send((name.as_str(), 0).to_socket_addrs().map(Iterator::collect)));
            });
            Box::pin(async move {
                started?;
                told.await.unwrap_or_else(|_| Err(io::Error::other("the lookup has ended without an answer")))
            })
        };
        Self::asked_by(ask, PATIENCE)
    }

    fn asked_by(ask: impl Fn(&str) -> Answer + Send + Sync + 'static, patience: Duration) -> Self {
        Self { known: Arc::default(), ask: Arc::new(ask), patience }
    }

    fn with<R>(&self, name: &str, look: impl FnOnce(&mut NameRecord) -> R) -> R {
        // What a panic leaves of it is as good as before.
        look(self.known.lock().unwrap_or_else(PoisonError::into_inner).entry(name.to_owned()).or_default())
    }

    /// The addresses of a name: new ones, or those of before where none come in time.
    async fn find(self, name: String) -> io::Result<Vec<SocketAddr>> {
        let before = self.with(&name, |known| known.addresses.clone());
        let mut lookup = self.lookup(&name);
        let ended = async {
            while lookup.changed().await.is_ok() {}
            lookup.borrow().clone()
        };
        let failed = match before.is_empty() {
            true => ended.await,
            false => tokio::time::timeout(self.patience, ended).await.unwrap_or(None),
        };
        match self.with(&name, |known| known.addresses.clone()) {
            none if none.is_empty() => {
                Err(io::Error::other(failed.unwrap_or_else(|| "the name has no address".to_owned())))
            }
            addresses => Ok(addresses),
        }
    }

    /// The lookup of a name that is under way, or one that begins.
    fn lookup(&self, name: &str) -> watch::Receiver<Option<String>> {
        let (tell, told) = watch::channel(None);
        let under_way = self.with(name, |known| match &known.lookup {
            Some(lookup) if lookup.has_changed().is_ok() => Some(lookup.clone()),
            _ => {
                known.lookup = Some(told.clone());
                None
            }
        });
        if let Some(lookup) = under_way {
            return lookup;
        }
        let (names, asked, name) = (self.clone(), (self.ask)(name), name.to_owned());
        tokio::spawn(async move {
            match asked.await {
                Ok(found) if !found.is_empty() => names.with(&name, |known| known.addresses = found),
                Ok(_) => {}
                // Nobody may be left who waits for it.
                Err(error) => drop(tell.send(Some(error.to_string()))),
            }
        });
        told
    }
}

impl Service<Name> for Names {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let found = self.clone().find(name.as_str().to_owned());
        Box::pin(async move { Ok(found.await?.into_iter()) })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use super::*;

    const HERE: &str = "10.0.0.4:0";

    /// Answers from a list, each time the next one; hangs where there is none.
    fn server(answers: &[Option<Result<&'static str, &'static str>>]) -> (Names, Arc<AtomicUsize>) {
        let (answers, asked) = (answers.to_vec(), Arc::new(AtomicUsize::new(0)));
        let count = asked.clone();
        let ask = move |_: &str| -> Answer {
            let answer = answers.get(count.fetch_add(1, SeqCst)).copied().flatten();
            Box::pin(async move {
                match answer {
                    Some(Ok(address)) => Ok(vec![address.parse().expect("an address")]),
                    Some(Err(why)) => Err(io::Error::other(why)),
                    None => std::future::pending().await,
                }
            })
        };
        (Names::asked_by(ask, Duration::from_millis(5)), asked)
    }

    async fn find(names: &Names) -> Result<String, String> {
        let found = names.clone().find("node0".to_owned()).await.map_err(|error| error.to_string())?;
        Ok(found[0].to_string())
    }

    #[tokio::test]
    async fn what_was_found_serves_where_the_server_hangs_or_fails_and_newer_addresses_replace_it() {
        let (names, _) = server(&[Some(Ok(HERE)), Some(Err("no")), Some(Ok("10.0.0.5:0")), None]);
        assert_eq!(find(&names).await, Ok(HERE.into()));
        assert_eq!(find(&names).await, Ok(HERE.into()), "the server says no");
        assert_eq!(find(&names).await, Ok("10.0.0.5:0".into()));
        assert_eq!(find(&names).await, Ok("10.0.0.5:0".into()), "it hangs");
    }

    #[tokio::test]
    async fn one_that_hangs_is_asked_once_however_often_it_is_called() {
        let (names, asked) = server(&[Some(Ok(HERE)), None]);
        for _ in 0..5 {
            assert_eq!(find(&names).await, Ok(HERE.into()));
        }
        assert_eq!(asked.load(SeqCst), 2);
    }

    #[tokio::test]
    async fn an_answer_that_comes_when_its_caller_has_gone_is_the_next_one_s() {
        let (tell, told) = tokio::sync::oneshot::channel::<()>();
        let told = Mutex::new(Some(told));
        let ask = move |_: &str| -> Answer {
            let told = told.lock().expect("no panic").take().expect("it is asked once");
            Box::pin(async move {
                told.await.expect("it is told");
                Ok(vec![HERE.parse().expect("an address")])
            })
        };
        let names = Names::asked_by(ask, Duration::from_secs(60));
        let gone = tokio::time::timeout(Duration::from_millis(5), find(&names)).await;
        assert!(gone.is_err(), "{gone:?}");
        tell.send(()).expect("it is still looked up");
        assert_eq!(find(&names).await, Ok(HERE.into()));
    }

    #[tokio::test]
    async fn a_name_that_nobody_knows_is_refused_with_the_reason() {
        let (names, _) = server(&[Some(Err("no such host")), Some(Ok(HERE))]);
        assert_eq!(find(&names).await, Err("no such host".into()));
        assert_eq!(find(&names).await, Ok(HERE.into()), "and is looked for again");
    }
}
