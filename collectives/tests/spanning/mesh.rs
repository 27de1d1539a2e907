//! An outer engine between threads of one process.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use symmpool_allocator::{Error, Result, Stream};
use symmpool_collectives::{Outer, Outers, Ticket, Transfer};

/// The connections of all outer engines of a test: messages from one rank to another of an engine with a name.
#[derive(Clone, Default)]
pub(crate) struct OuterConnections(Arc<(Mutex<State>, Condvar)>);

#[derive(Default)]
struct State {
    queues: BTreeMap<(String, u32, u32), VecDeque<Vec<u8>>>,
    /// Ranks of engines that have closed their connections.
    closed: BTreeSet<(String, u32)>,
    bytes: u64,
    messages: u64,
    /// Messages of another length than the rank that got them expected: gloo may end the process there.
    misfits: u64,
    /// The rank of the group whose connections are cut, and how many transfers it begins before that.
    cut: Option<(u32, u64)>,
}

impl OuterConnections {
    /// The outer engines of a rank, whose group's ranks are on these hosts.
    pub(crate) fn outers(&self, hosts: &[&str], rank: u32) -> Outers {
        let mut names: Vec<&str> = Vec::new();
        for host in hosts {
            if !names.contains(host) {
                names.push(host);
            }
        }
        let on = |name: &str| -> Vec<usize> {
            (0..hosts.len()).filter(|&other| hosts[other] == name).collect()
        };
        let here = on(hosts[rank as usize]);
        let is_even = names.iter().all(|name| on(name).len() == here.len());
        let index = here.iter().position(|&other| other == rank as usize).unwrap();
        let host = names.iter().position(|name| *name == hosts[rank as usize]).unwrap();
        let has_rail = names.len() > 1 && (is_even || index == 0);
        let rail: Option<Box<dyn Outer>> = has_rail.then(|| {
            let mut rail = self.outer(&format!("rail{index}"), host as u32, names.len() as u32);
            rail.owner = rank;
            Box::new(rail) as Box<dyn Outer>
        });
        Outers { rail, flat: Box::new(self.outer("flat", rank, hosts.len() as u32)) }
    }

    pub(crate) fn outer(&self, name: &str, rank: u32, world: u32) -> ThreadOuter {
        ThreadOuter {
            mesh: self.clone(),
            name: name.to_owned(),
            owner: rank,
            rank,
            world,
            begun: BTreeMap::new(),
            tickets: 0,
            limit: Duration::from_secs(20),
        }
    }

    /// Cuts the connections of a rank of the group behind so many more transfers that it begins.
    pub(crate) fn cut(&self, rank: u32, transfers: u64) {
        self.0.0.lock().unwrap().cut = Some((rank, transfers));
    }

    /// Whether connections are still to be cut.
    pub(crate) fn is_uncut(&self) -> bool {
        self.0.0.lock().unwrap().cut.is_some()
    }

    /// Messages of another length than was expected.
    pub(crate) fn misfits(&self) -> u64 {
        self.0.0.lock().unwrap().misfits
    }

    /// Messages that were sent so far to other ranks.
    pub(crate) fn messages(&self) -> u64 {
        self.0.0.lock().unwrap().messages
    }

    /// Bytes that were sent so far to other ranks.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.0.lock().unwrap().bytes
    }
}

/// One rank's side.
pub(crate) struct ThreadOuter {
    mesh: OuterConnections,
    name: String,
    /// Rank in the group.
    owner: u32,
    rank: u32,
    world: u32,
    /// Parts that are to be received: from whom, to where, how many bytes.
    begun: BTreeMap<u64, Vec<(u32, usize, usize)>>,
    tickets: u64,
    limit: Duration,
}

impl ThreadOuter {
    fn send(&self, to: u32, bytes: &[u8]) {
        let (lock, changed) = &*self.mesh.0;
        let mut state = lock.lock().unwrap();
        if to != self.rank {
            state.bytes += bytes.len() as u64;
            state.messages += 1;
        }
        state
            .queues
            .entry((self.name.clone(), self.rank, to))
            .or_default()
            .push_back(bytes.to_vec());
        changed.notify_all();
    }
}

// SAFETY: inputs are copied when a transfer begins, and outputs are written by `finish` alone.
unsafe impl Outer for ThreadOuter {
    fn name(&self) -> String {
        "threads".into()
    }

    fn rank(&self) -> u32 {
        self.rank
    }

    fn world(&self) -> u32 {
        self.world
    }

    fn set_timeout(&mut self, limit: Duration) {
        self.limit = limit;
    }

    unsafe fn begin(&mut self, transfer: Transfer<'_>, _: &Stream) -> Result<Ticket> {
        let mut state = self.mesh.0.0.lock().unwrap();
        match &mut state.cut {
            Some((rank, 0)) if *rank == self.owner => {
                state.cut = None;
                return Err(Error::system("a transfer", "the cable was cut"));
            }
            Some((rank, left)) if *rank == self.owner => *left -= 1,
            _ => {}
        }
        drop(state);
        let bytes = |at: *const u8, count: usize| match count {
            0 => Vec::new(),
            // SAFETY: the caller promised that the transfer's memory is there.
            _ => unsafe { std::slice::from_raw_parts(at, count) }.to_vec(),
        };
        let mut expected = Vec::new();
        match transfer {
            Transfer::AllGather { output, input, bytes: count } => {
                for peer in 0..self.world {
                    self.send(peer, &bytes(input, count));
                    expected.push((peer, output as usize + peer as usize * count, count));
                }
            }
            Transfer::AllToAll { output, input, send, receive } => {
                let (mut from, mut to) = (0, 0);
                for peer in 0..self.world {
                    let (out, back) = (send[peer as usize], receive[peer as usize]);
                    self.send(peer, &bytes(input.wrapping_add(from), out));
                    expected.push((peer, output as usize + to, back));
                    from += out;
                    to += back;
                }
            }
            Transfer::Broadcast { data, bytes: count, root } => {
                if root == self.rank {
                    let data = bytes(data, count);
                    (0..self.world)
                        .filter(|peer| *peer != root)
                        .for_each(|peer| self.send(peer, &data));
                } else {
                    expected.push((root, data as usize, count));
                }
            }
            _ => return Err(Error::unsupported("another transfer")),
        }
        self.tickets += 1;
        self.begun.insert(self.tickets, expected);
        Ok(Ticket(self.tickets))
    }

    fn finish(&mut self, ticket: Ticket, _: &Stream) -> Result<()> {
        let (lock, changed) = &*self.mesh.0;
        let until = Instant::now() + self.limit;
        for (peer, at, count) in self.begun.remove(&ticket.0).expect("a ticket") {
            let mut state = lock.lock().unwrap();
            let bytes = loop {
                let key = (self.name.clone(), peer, self.rank);
                if let Some(bytes) = state.queues.get_mut(&key).and_then(VecDeque::pop_front) {
                    break bytes;
                }
                if state.closed.contains(&(self.name.clone(), peer)) {
                    return Err(Error::peer_lost(vec![peer], "the connection was closed"));
                }
                if Instant::now() > until {
                    return Err(Error::timeout("a message", self.limit, vec![peer]));
                }
                state = changed.wait_timeout(state, Duration::from_millis(20)).unwrap().0;
            };
            drop(state);
            if bytes.len() != count {
                lock.lock().unwrap().misfits += 1;
                let why = format!("{} bytes of rank {peer}, and {count} expected", bytes.len());
                return Err(Error::system("a transfer", why));
            }
            // SAFETY: whoever began the transfer promised that the output is there until it is finished.
            unsafe { bytes.as_ptr().copy_to_nonoverlapping(at as *mut u8, count) };
        }
        Ok(())
    }

    fn abort(&mut self) -> Result<()> {
        let (lock, changed) = &*self.mesh.0;
        lock.lock().unwrap().closed.insert((self.name.clone(), self.rank));
        changed.notify_all();
        self.begun.clear();
        Ok(())
    }
}

impl Drop for ThreadOuter {
    /// A connection closes with its rank.
    fn drop(&mut self) {
        let _ = self.abort();
    }
}
