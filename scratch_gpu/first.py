import os, sys, time, itertools
sys.path.insert(0, os.getcwd())
import numpy as np, cupy as cp, cuflash
from cuflash import masks, compile as cc, tiles, plans, passes, gpu
from cuflash.launch import Executable
from dataclasses import replace
OUT=os.environ.get("OUT",".")
print(cp.cuda.runtime.getDeviceProperties(0)["name"], cp.__version__, gpu.current_device())
rng=np.random.default_rng(0)
def check(tag,q,k,v,do,dlse=None,**kw):
    try:
        dev=[cp.asarray(x) for x in (q,k,v,do)]
        (o,lse),vjp=cuflash.attention_vjp(*dev[:3],return_lse=True,**kw)
        g=vjp(dev[3],None if dlse is None else cp.asarray(dlse))
        res=dict(o=o,lse=lse,dq=g.dq,dk=g.dk,dv=g.dv)
        kw2=dict(kw)
        b=cuflash.error_bound(q,k,v,do,dlse=dlse,**{k_:v_ for k_,v_ in kw2.items() if k_ not in("kernel",)}) if False else None
        (ro,rl),rv=cuflash.attention_vjp(*[x.astype(np.float64) for x in (q,k,v)],return_lse=True,**{a:b_ for a,b_ in kw.items() if a!="kernel"})
        rg=rv(do.astype(np.float64),None if dlse is None else dlse.astype(np.float64))
        ref=dict(o=ro,lse=rl,dq=rg.dq,dk=rg.dk,dv=rg.dv)
        errs={}
        for n in ref:
            a=cp.asnumpy(res[n]).astype(np.float64); r=ref[n]
            fin=np.isfinite(r)
            same=(a[~fin]==r[~fin]).all()
            errs[n]=(float(np.linalg.norm((a-r)[fin])/(np.linalg.norm(r[fin])+1e-300)), bool(same))
        bad=[n for n,(e,s) in errs.items() if not s or not e<{2:3e-3,4:1e-5,8:1e-13}[q.dtype.itemsize]]
        print("BAD" if bad else "ok ",tag,{n:f"{e:.1e}" for n,(e,s) in errs.items()},bad,flush=True)
    except Exception as e:
        print("EXC",tag,type(e).__name__,str(e)[:600],flush=True)
def mk(shape_q,shape_k,dv,dt):
    h=lambda *s: rng.standard_normal(s).astype(dt)
    return h(*shape_q),h(*shape_k),h(*shape_k[:-1],dv),h(*shape_q[:-1],dv)
for dt in (np.float32,np.float64,np.float16):
    check(f"dense {dt.__name__}",*mk((2,130,64),(2,200,64),64,dt))
check("causal",*mk((2,3,300,64),(2,3,300,64),64,np.float32),causal=True)
check("window br gqa",*mk((2,4,150,40),(2,2,300,40),24,np.float32),window=(50,3),causal="bottom_right")
check("lengths dlse",*mk((2,2,100,32),(2,2,90,32),32,np.float32),dlse=rng.standard_normal((2,2,100)).astype(np.float32),mask=masks.Lengths(q=np.array([50,100]),kv=np.array([90,17])))
doc=np.sort(rng.integers(0,5,300))
check("documents",*mk((2,300,64),(2,300,64),64,np.float32),causal=True,mask=masks.Documents(doc))
check("bits",*mk((2,300,64),(2,300,64),64,np.float32),mask=rng.random((300,300))<0.3)
check("blocks",*mk((2,512,64),(2,512,64),64,np.float32),mask=masks.BlockPattern(rng.random((2,8,8))<0.4,64))
check("blocks16",*mk((2,256,64),(2,256,64),64,np.float64),mask=masks.BlockPattern(rng.random((16,16))<0.4,16))
check("dilated",*mk((2,200,128),(2,260,128),128,np.float32),mask=masks.Dilated(3,align="bottom_right"))
check("big dims",*mk((2,200,256),(2,260,256),256,np.float32))
check("big dims64",*mk((2,100,256),(2,130,256),200,np.float64))
check("d1",*mk((2,100,1),(2,130,1),3,np.float64))
q,k,v,do=mk((5,1,33,16),(1,2,33,16),16,np.float32)
check("broadcast",q.repeat(2,1),k,v,np.repeat(do,2,1),causal=True)
qt=np.swapaxes(rng.standard_normal((2,100,3,64)).astype(np.float32),1,2); check("strided",qt,qt,qt,qt.copy())
def bench(f,n=20):
    f(); cp.cuda.Device().synchronize(); ts=[]
    for _ in range(n):
        a,b=cp.cuda.Event(),cp.cuda.Event(); a.record(); f(); b.record(); b.synchronize(); ts.append(cp.cuda.get_elapsed_time(a,b))
    return np.median(ts)
# FMA rate
src=r'''extern "C" __global__ void fma_rate(T* x, int n){ T a[16]; for(int i=0;i<16;++i)a[i]=x[i]+threadIdx.x; T b=x[0],c=x[1]; for(int k=0;k<n;++k){
#pragma unroll
for(int i=0;i<16;++i)a[i]=a[i]*b+c;} T s=0; for(int i=0;i<16;++i)s+=a[i]; if(s==12345)x[0]=s; }'''
peak={}
for T,dt in (("float",np.float32),("double",np.float64)):
    f=cp.RawKernel(src.replace("T ","%s "%T).replace("T*","%s*"%T),"fma_rate"); x=cp.ones(16,dt)
    t=bench(lambda:f((132*8,),(256,),(x,np.int32(4096)))); peak[dt]=132*8*256*4096*16*2/t/1e9; print("FMA rate",T,peak[dt],"TFLOP/s")
for dt in (np.float64,):
    x=cp.ones((4096,4096),dt); 
    try: t=bench(lambda:x@x,5); print("matmul f64",2*4096**3/t/1e9)
    except Exception as e: print("matmul",e)
def run_spec(d,dt,entry,spec,causal=False,B=4,H=8,N=4096):
    dev=[cp.asarray(rng.standard_normal((B,H,N,d)).astype(dt)) for _ in range(4)]
    ex=cuflash.plan(*dev[:3],causal=causal); plan=ex.plan
    plan2=replace(plan,specs=plan.specs|({entry:spec} if spec else {}))
    return dev,Executable(plan2,"gpu")
todo=[]
for d in (64,128):
  for dt in (np.float32,np.float64):
    for entry in ("forward","backward_rows","backward_columns"):
        from cuflash.source import KernelSpec
        for bq,bk in itertools.product((64,32,16),(64,32,16,8)):
            if entry=="backward_columns": bq,bk=bk,bq
            spec=KernelSpec(family="simt",entry=entry,dtype=np.dtype(dt),head_dim=d,value_dim=d,block_q=bq,block_kv=bk)
            if tiles._is_simt_tile(spec) and tiles.shared_bytes(spec)<=232448: todo.append(spec)
t0=time.time(); cc.precompile(todo,(9,0)); print(len(todo),"specs compiled in",time.time()-t0,flush=True)
for d in (64,128):
  for dt in (np.float32,np.float64):
    N=4096 if dt==np.float32 else 2048
    dev,ex=run_spec(d,dt,"forward",None,N=N); o,lse=ex.forward(*dev[:3])
    fl=4*4*8*N*N*d
    for entry in ("forward","backward_rows","backward_columns"):
        base=ex.plan.specs[entry]
        for bq,bk in itertools.product((64,32,16),(64,32,16,8)):
            if entry=="backward_columns": bq,bk=bk,bq
            spec=replace(base,block_q=bq,block_kv=bk)
            if not tiles._is_simt_tile(spec) or tiles.shared_bytes(spec)>232448: continue
            p2=replace(ex.plan,specs=ex.plan.specs|{entry:spec})
            g=[cp.empty_like(x) for x in dev[:3]]; delta=cp.empty(lse.shape,dt)
            arr=dict(q=dev[0],k=dev[1],v=dev[2],o=o,lse=lse)
            if entry!="forward": arr|=dict(do=dev[3],dq=g[0],dk=g[1],dv=g[2],delta=delta)
            try:
                t=bench(lambda: passes._run(p2,gpu._GPU,(entry,),arr),5)
                n={"forward":1,"backward_rows":1.5,"backward_columns":2}[entry]
                made=[c for c in cc._compiled.values() if c.spec==spec][0].resources
                print(d,np.dtype(dt),entry,(bq,bk),f"{t:.3f} ms {n*fl/t/1e9:.2f} TF ({n*fl/t/1e9/peak[dt]:.2f}) regs {made.registers} stack {made.stack_bytes} smem {tiles.shared_bytes(spec)}"," <-" if spec==base else "",flush=True)
            except Exception as e: print("EXC",d,dt,entry,bq,bk,str(e)[:200],flush=True)
    t=bench(lambda:ex.backward(dev[3],*dev[:3],o,lse),5); print(d,np.dtype(dt),"backward total",t,2.5*fl/t/1e9/peak[dt],flush=True)
x=[cp.asarray(rng.standard_normal((1,8,512,64)).astype(np.float32)) for _ in range(3)]
for _ in range(100): cuflash.attention(*x,causal=True)
cp.cuda.Device().synchronize(); ts=[]
for _ in range(3000):
    a=time.perf_counter(); cuflash.attention(*x,causal=True); ts.append(time.perf_counter()-a)
print("host us",np.median(ts)*1e6)
for c in list(cc._compiled.values())[:6]: print(c)
