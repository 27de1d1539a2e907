//! Plans written as functions of a rank, as `symmpool.language` has them.

use symmpool_collectives::plan::{
    Buffer, Collective, Instruction, Operation, Plan, Protocol, Span,
};

/// One rank, as its program sees it.
pub(super) struct Me {
    pub(super) rank: u32,
    pub(super) world: u32,
    group: Option<u32>,
    program: Vec<Instruction>,
}

impl Me {
    pub(super) fn input(&self, index: u32) -> Span {
        place(self.rank, Buffer::Input, index)
    }

    pub(super) fn output(&self, index: u32) -> Span {
        place(self.rank, Buffer::Output, index)
    }

    pub(super) fn scratch(&self, index: u32) -> Span {
        place(self.rank, Buffer::Scratch, index)
    }

    /// The other ranks, beginning with the next.
    pub(super) fn peers(&self) -> Vec<u32> {
        (1..self.world).map(|distance| (self.rank + distance) % self.world).collect()
    }

    /// Lines count operations from 1.
    fn add(&mut self, operation: Operation) {
        let line = self.program.len() as u32 + 1;
        self.program.push(Instruction { operation, group: self.group, line });
    }

    pub(super) fn copy(&mut self, dst: Span, src: Span) {
        self.add(Operation::Copy { dst, src });
    }

    pub(super) fn put(&mut self, dst: Span, src: Span) {
        self.add(Operation::Put { dst, src });
    }

    pub(super) fn get(&mut self, dst: Span, src: Span) {
        self.add(Operation::Get { dst, src });
    }

    pub(super) fn reduce(&mut self, dst: Span, srcs: Vec<Span>) {
        self.add(Operation::Reduce { dst, srcs });
    }

    pub(super) fn signal(&mut self, peer: u32) {
        self.signal_on(peer, 0);
    }

    pub(super) fn wait(&mut self, peer: u32) {
        self.wait_on(peer, 0);
    }

    pub(super) fn signal_on(&mut self, peer: u32, channel: u32) {
        self.add(Operation::Signal { peer, channel });
    }

    pub(super) fn wait_on(&mut self, peer: u32, channel: u32) {
        self.add(Operation::Wait { peer, channel });
    }

    pub(super) fn barrier(&mut self) {
        self.add(Operation::Barrier);
    }

    pub(super) fn join(&mut self) {
        self.add(Operation::Join);
    }

    pub(super) fn in_group(&mut self, group: u32, body: impl FnOnce(&mut Self)) {
        self.group = Some(group);
        body(self);
        self.group = None;
    }

    pub(super) fn signal_all(&mut self) {
        self.peers().into_iter().for_each(|peer| self.signal(peer));
    }

    pub(super) fn wait_all(&mut self) {
        self.peers().into_iter().for_each(|peer| self.wait(peer));
    }
}

/// A chunk of a rank's buffer.
pub(super) fn place(rank: u32, buffer: Buffer, index: u32) -> Span {
    Span { rank, buffer, index, count: 1 }
}

/// The plan of a program that is the same function on every rank.
pub(super) fn plan(
    name: &str,
    collective: Collective,
    world: u32,
    chunks: u32,
    scratch: u32,
    program: impl Fn(&mut Me),
) -> Plan {
    let programs = (0..world)
        .map(|rank| {
            let mut me = Me { rank, world, group: None, program: Vec::new() };
            program(&mut me);
            me.program
        })
        .collect();
    Plan {
        name: name.to_owned(),
        collective,
        world,
        chunks,
        scratch,
        reproducible: true,
        protocol: Protocol::Simple,
        blocks: None,
        source: "builder.rs".to_owned(),
        programs,
    }
}
