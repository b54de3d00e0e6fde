//! [`Plan`]: a checked collective with its buffers, before it is started or prepared.

use super::{Kept, MaybeDangling, Request, Unpack, Work};
use crate::api::comm::Comm;
use crate::buffer::stream::Stream;
use crate::buffer::{Owned, Target};
use crate::contract::Call;
use crate::reduce::custom::Custom;
use crate::types::dtype::Plain;
use crate::types::error::Result;
use crate::types::op::CombineInOrder;
use std::mem::ManuallyDrop;

/// A checked collective, and the buffers, counts and closure that it will use.
pub(super) struct Plan<B> {
    pub buffers: MaybeDangling<B>,
    pub kept: MaybeDangling<Kept>,
    pub call: Call<'static>,
    pub access: Access<B>,
}

/// How a call gets at its buffers.
pub(super) struct Access<B> {
    /// Their addresses and lengths.
    pub look: fn(&mut B, &Stream) -> [(*const u8, usize); 2],
    /// Puts their types and addresses into the call.
    pub place: fn(&mut B, Call<'static>, &Stream, usize) -> Result<Call<'static>>,
}

/// A buffer without elements.
const NOTHING: (*const u8, usize) = (std::ptr::null(), 0);

/// Address and length of a buffer of the host.
#[inline(always)]
pub(super) fn look_at<B: Owned>(buf: &B, stream: &Stream) -> (*const u8, usize) {
    let start = buf.lend(stream).map_or(std::ptr::null(), |loan| loan.span().start.cast_const());
    (start, buf.len())
}

impl Plan<()> {
    pub fn of_none(call: Call<'static>) -> Plan<()> {
        let access = Access { look: |(), _| [NOTHING; 2], place: |(), call, _, _| Ok(call) };
        Plan { buffers: MaybeDangling::new(()), kept: MaybeDangling::new(Kept::default()), call, access }
    }
}

impl<B: Owned> Plan<B> {
    /// A collective of one buffer.
    pub fn of_one(call: Call<'static>, buf: B) -> Result<Plan<B>> {
        let access = Access {
            look: |buf: &mut B, stream| [look_at(buf, stream), NOTHING],
            place: |buf: &mut B, call, stream, rank| {
                let call = call.of_type(buf.dtype())?;
                Ok(call.inside(&buf.lend_mut(stream)?, stream, rank))
            },
        };
        Ok(Plan { buffers: MaybeDangling::new(buf), kept: MaybeDangling::new(Kept::default()), call, access })
    }
}

impl<S: Owned, R: Owned + Target<Elem = S::Elem>> Plan<(S, R)> {
    /// A collective of two buffers.
    pub fn of_two(call: Call<'static>, send: S, recv: R) -> Result<Plan<(S, R)>> {
        let access = Access {
            look: |(send, recv): &mut (S, R), stream| [look_at(send, stream), look_at(recv, stream)],
            place: |(send, recv): &mut (S, R), call, stream, _| {
                let call = call.of_types(send.dtype(), recv.dtype())?;
                Ok(call.between(&send.lend(stream)?, &recv.lend_mut(stream)?, stream))
            },
        };
        let buffers = MaybeDangling::new((send, recv));
        Ok(Plan { buffers, kept: MaybeDangling::new(Kept::default()), call, access })
    }

    /// A v-variant: `check` gets the lengths of both buffers, and the counts.
    pub fn of_blocks(
        send: S,
        recv: R,
        counts: [Vec<usize>; 2],
        check: impl for<'a> FnOnce([usize; 2], &'a [Vec<usize>; 2]) -> Result<Call<'a>>,
    ) -> Result<Plan<(S, R)>> {
        let call = check([send.len(), recv.len()], &counts)?;
        // SAFETY: the plan, and then the request, owns the counts as it does the buffers: until the operation is over, and for ever if it
        // is forgotten. They are on the heap, stay at their address when the plan is moved, and nobody changes them.
        let call = unsafe { std::mem::transmute::<Call<'_>, Call<'static>>(call) };
        let kept = MaybeDangling::new(Kept { counts, ..Kept::default() });
        Ok(Plan { kept, ..Plan::of_two(call, send, recv)? })
    }
}

impl<B> Plan<B> {
    /// With the closure by which it reduces.
    pub fn combining<T: Plain>(mut self, combine: impl Fn(&T, &T) -> T + Send + 'static) -> Plan<B> {
        let closure: &dyn CombineInOrder =
            &**self.kept.get_mut().closure.insert(Box::new(Custom::new(combine)));
        // SAFETY: as for the counts of `of_blocks`. One thread at a time carries the operation out, so the closure need not be `Sync`.
        let closure =
            unsafe { std::mem::transmute::<&dyn CombineInOrder, &'static dyn CombineInOrder>(closure) };
        self.call = self.call.combining(closure);
        self
    }
}

impl Comm {
    /// Starts a planned collective.
    pub(super) fn start<B>(&self, plan: Plan<B>) -> Result<Request<B>> {
        let Plan { mut buffers, kept, call, access } = plan;
        let call = (access.place)(buffers.get_mut(), call, &self.stream, self.rank())?;
        self.start_calls(&[call], buffers, kept, None)
    }

    /// Starts collectives as one request.
    pub(super) fn start_calls<B>(
        &self,
        calls: &[Call<'static>],
        buffers: MaybeDangling<B>,
        kept: MaybeDangling<Kept>,
        unpack: Option<Unpack<B>>,
    ) -> Result<Request<B>> {
        let (deadline, requests) = (self.deadline, self.requests.clone());
        // A panic on the way leaks them: an operation may have been started.
        let (buffers, kept) = (ManuallyDrop::new(buffers), ManuallyDrop::new(kept));
        match requests.start(calls, &self.stream, deadline) {
            Ok(outcome) => {
                let work = Work::Collective(outcome);
                Ok(Request { buffers, kept, unpack, work, deadline, requests })
            }
            Err(error) => {
                drop((ManuallyDrop::into_inner(buffers), ManuallyDrop::into_inner(kept)));
                Err(error)
            }
        }
    }
}
