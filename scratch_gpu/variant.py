import sys; sys.path.insert(0,'/work/main')
import numpy as np, itertools
from concurrent.futures import ThreadPoolExecutor
from cuflash import compile as cc
from cuflash.source import KernelSpec, source
import re
def variant(text, unroll_nt, unroll_nn, blocks):
    a,b=text.split("c += a b: a thread",1)
    a=a.replace("#pragma unroll 2","#pragma unroll %d"%unroll_nt); b=b.replace("#pragma unroll 2","#pragma unroll %d"%unroll_nn)
    t=a+"c += a b: a thread"+b
    return t.replace("__launch_bounds__(cuflash::tile::kThreads)","__launch_bounds__(cuflash::tile::kThreads, %d)"%blocks)
if __name__=="__main__":
    for e,dt,d,bq,bk in [("forward","f4",64,128,64),("forward","f4",128,128,32),("forward","f4",128,128,64),("forward","f8",64,64,64),("forward","f8",64,128,32),("forward","f8",128,64,32),("backward_rows","f4",64,128,32),("backward_rows","f4",64,128,64),("backward_rows","f4",128,128,32),("backward_columns","f4",64,32,128),("backward_columns","f4",64,64,128)]:
        s=KernelSpec(family='simt',entry=e,dtype=np.dtype(dt),head_dim=d,value_dim=d,block_q=bq,block_kv=bk)
        out=[]
        for v in [(1,1,1),(2,2,1),(1,1,2)]:
            t=variant(source(s),*v); old=cc.source; cc.source=lambda spec:t
            try: c=cc.cubin(s,"sm_90"); out.append((v,c.resources.registers,c.resources.spill_bytes))
            except Exception as x: out.append((v,str(x)[-200:]))
            cc.source=old
        print(e,dt,d,bq,bk,out,flush=True)
